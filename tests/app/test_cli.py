"""Commands start in any folder. Signals end them as Ctrl-C does, unless a signal is ignored."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import serving
from app.interrupt import SIGNALS, Interrupt
from app.serving import codec_of, plan_of, until_signalled
from hackkv import __version__
from hackkv.errors import ConfigError
from tests.e2e.processes import hackkv_command

TIMEOUT_S = 240.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Set signal handlers as in a terminal, even if the tests run under nohup. Afterwards restores the runner's."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_a_role_runs_beside_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("router", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else’s')", encoding="utf-8")
    command = hackkv_command("router", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hackkv router ")


def test_the_version_is_printed() -> None:
    done = subprocess.run(hackkv_command("--version"), capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout == f"hackkv {__version__}\n"


@pytest.mark.parametrize("signum", SIGNALS)
async def test_a_signal_ends_a_command_and_a_second_one_does_not_break_off_the_end(signum: signal.Signals) -> None:
    interrupt, ended = Interrupt(), asyncio.Event()

    async def main() -> int:
        os.kill(os.getpid(), signum)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signum)
            await asyncio.sleep(0)
            ended.set()
        return 0

    assert await asyncio.wait_for(until_signalled(interrupt, main()), TIMEOUT_S) == 130
    assert ended.is_set()


async def test_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = Interrupt()

    async def main() -> int:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        return 0

    assert await asyncio.wait_for(until_signalled(interrupt, main()), TIMEOUT_S) == 0


def test_the_shipped_model_serves_where_smollm2_is_not_installed_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "has_smollm2", lambda: False)
    plan = plan_of({"path": "smollm2"}, "fp16", (1, 1), {})
    assert plan.worker["model"]["path"] == ""
    assert "smollm2 is not installed" in capsys.readouterr().err


def test_a_prompt_may_take_all_cores_and_a_decode_step_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    plan = plan_of({"path": "", "dtype": "float32"}, "fp16", (2, 2), {})
    prefill, decode = plan.settings_of("prefill")["model"], plan.settings_of("decode")["model"]
    assert (prefill.pop("threads"), decode.pop("threads")) == (8, 2)
    assert prefill == decode == {"path": "", "dtype": "float32"}


def test_a_codec_may_be_allowed_to_lose() -> None:
    assert codec_of("hack") == {"name": "hack", "settings": {}, "allow_loss": False}
    assert codec_of("hack,allow_loss") == {"name": "hack", "settings": {}, "allow_loss": True}
    with pytest.raises(ConfigError, match="expected NAME, NAME,allow_loss or NAME,calibration=FILE"):
        codec_of("hack,allow")


def test_a_calibration_file_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"calibration": str(tmp_path / "model.safetensors")}
    fitted = {"name": "rot-k3v2", "settings": settings, "allow_loss": True}
    assert codec_of("rot-k3v2,calibration=model.safetensors,allow_loss") == fitted
    with pytest.raises(ConfigError, match="expected NAME, "):
        codec_of("rot-k3v2,calibration=")
