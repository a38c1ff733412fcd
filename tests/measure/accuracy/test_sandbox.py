"""The sandbox allows some actions of a program and refuses others."""

from __future__ import annotations

from pathlib import Path

import pytest

from measure.accuracy.sandbox import passes

FINE = (
    "x = 1",
    "import math, collections, itertools, re\nassert math.prod([2, 3]) == 6",
    "import hashlib\nassert hashlib.md5(b'').hexdigest()[0] == 'd'",
)
REFUSED = (
    "assert 0",
    "def broken(",
    "import sys; sys.exit(0)",
    "raise KeyboardInterrupt",
    "import os; os.system('true')",
    "import os; os.fork()",
    "import subprocess; subprocess.run(['true'])",
    "import os; os.kill(os.getppid(), 0)",
    "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
    "open('made', 'w')",
    "import threading; threading.Thread(target=print).start()",
    "x = [0] * 10**9",
)


@pytest.mark.parametrize("program", FINE)
def test_programs_that_compute_pass(program: str) -> None:
    assert passes(program)


@pytest.mark.parametrize("program", REFUSED)
def test_programs_that_fail_or_reach_out_do_not(program: str) -> None:
    assert not passes(program)


def test_nothing_is_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    assert not passes(f"import os; os.remove({str(kept)!r})")
    assert not passes(f"import shutil; shutil.rmtree({str(tmp_path)!r})")
    assert kept.exists()


@pytest.mark.slow
def test_a_program_that_never_ends_is_stopped() -> None:
    assert not passes("while True: pass")
