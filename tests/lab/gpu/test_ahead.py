"""Kernels are compiled for a GPU that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = """
import hashlib
import sys
import torch
from hack_kernels.triton.ahead import TritonCompiler
from hack_kernels.triton.row_ops import gate_launch
from lab.gpu.absent import target_of

outs, progress = [torch.ones(3, width) for width in (32, 64, 128, 256)], []
launches = [gate_launch(torch.ones(3, 2 * out.shape[1]), out) for out in outs]
if sys.argv[1] == "alone":
    with target_of(90):
        kernels = [each.kernel.warmup(grid=each.grid, **each.arguments, **each.options) for each in launches]
else:
    with target_of(90), TritonCompiler().compiling(lambda *counts: progress.append(counts)) as kernels:
        for each in (*launches, *launches):
            each.run()
    assert not any(out.any() for out in outs), "nothing was launched"
    assert len(progress) == len(launches), "a kernel is compiled once"
    assert max(progress) == (len(launches), len(launches))
    assert [each.hash for each in kernels[:4]] == [each.hash for each in kernels[4:]]
for each in kernels[: len(launches)]:
    print(each.metadata.target.arch, each.hash, hashlib.sha256(each.asm["cubin"]).hexdigest())
"""


def run(how: str, cache: Path) -> str:
    """The output of the program, in a process of its own: Triton decides at import whether it interprets."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env=kept | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_launches_compile_at_once_what_they_would_have_compiled_alone_and_run_nothing(tmp_path: Path) -> None:
    ahead = run("ahead", tmp_path / "ahead")
    assert ahead.startswith("90 ")
    assert ahead == run("alone", tmp_path / "alone")
    assert list((tmp_path / "ahead").glob("*/*.cubin"))
