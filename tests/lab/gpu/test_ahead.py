"""Kernels are compiled for a GPU that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from hack_kernels.triton.row_ops import gate_launch
from lab.gpu.ahead import compiling_for

out = torch.ones(3, 64)
with compiling_for(90) as compiled:
    gate_launch(torch.ones(3, 128), out).run()
assert not out.any(), "nothing was launched"
print(compiled[0].metadata.target.arch, len(compiled[0].asm["cubin"]) > 0)
"""


def test_a_launch_compiles_and_leaves_zeros(tmp_path: Path) -> None:
    """The test needs a process of its own: Triton decides at import whether it interprets."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["90", "True"]
    assert list(tmp_path.glob("*/*.cubin"))
