"""How commands start, wherever they are typed, and end: by a signal as by Ctrl-C, and by none that is switched off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from app import cli
from app.cli import _until_signalled
from app.cluster import role_command
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError

TIMEOUT_S = 10.0


def test_a_role_runs_beside_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("router", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else’s')", encoding="utf-8")
    command = role_command("router", ["--help"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hackkv router ")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_a_command(signum: signal.Signals) -> None:
    async def main() -> int:
        os.kill(os.getpid(), signum)
        await asyncio.Event().wait()
        return 0

    assert await asyncio.wait_for(_until_signalled(main()), TIMEOUT_S) == 130


async def test_nohup_outlives_its_terminal() -> None:
    async def main() -> int:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert await asyncio.wait_for(_until_signalled(main()), TIMEOUT_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_shipped_model_serves_where_smollm2_is_not_installed_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "has_smollm2", lambda: False)
    plan = cli._plan(ModelConfig(path="smollm2"), CodecConfig(name="fp16"), 1, 1, {})
    assert plan.router["served_model_name"] == "hackkv-small"
    assert "smollm2 is not installed" in capsys.readouterr().err


def test_a_codec_may_be_allowed_to_lose() -> None:
    assert cli._codec("hack") == CodecConfig(name="hack")
    assert cli._codec("hack,allow_loss") == CodecConfig(name="hack", allow_loss=True)
    with pytest.raises(ConfigError, match="expected NAME or NAME,allow_loss"):
        cli._codec("hack,allow")
