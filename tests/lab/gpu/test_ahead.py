"""Kernels are compiled for a GPU that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
import torch
from hack_kernels.triton.ahead import TritonCompiler
from hack_kernels.triton.row_ops import gate_launch, norm_launch
from lab.gpu.absent import target_of

x, out, progress = torch.ones(3, 128), torch.ones(3, 64), []
gate = gate_launch(x, out)
if sys.argv[1] == "alone":
    with target_of(90):
        kernels = [gate.kernel.warmup(grid=gate.grid, **gate.arguments, **gate.options)]
else:
    with target_of(90), TritonCompiler().compiling(lambda *counts: progress.append(counts)) as kernels:
        gate.run()
        gate.run()
    assert not out.any(), "nothing was launched"
    assert progress == [(1, 1)], "a kernel is compiled once"
    assert kernels[0].result() is kernels[1].result()
print(kernels[0].metadata.target.arch, kernels[0].hash, len(kernels[0].asm["cubin"]))
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


def test_a_launch_compiles_what_it_would_have_compiled_alone_and_runs_nothing(tmp_path: Path) -> None:
    ahead = run("ahead", tmp_path / "ahead")
    assert ahead.startswith("90 ")
    assert ahead == run("alone", tmp_path / "alone")
    assert list((tmp_path / "ahead").glob("*/*.cubin"))
