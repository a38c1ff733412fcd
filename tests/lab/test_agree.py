"""The program behind `make arm`, compiled for this machine alone: it must keep up with the kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

AGREE = Path(__file__).parents[2] / "lab/agree.sh"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_pages_make_the_round_trip() -> None:
    done = subprocess.run([AGREE, "here"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines
    assert all(line.endswith("round trip exact") for line in lines)
    for word in ("stochastic 1", "levels", "feedback", "scales of a byte", "bits 8/8"):
        assert any(word in line for line in lines), word
