"""How the command line ends: by a signal as by Ctrl-C, and by none that its caller has switched off."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from hackkv.cli import _until_signalled

TIMEOUT_S = 10.0


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
