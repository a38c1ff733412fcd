"""The measurement of memory does not change the memory that it measures."""

from __future__ import annotations

import subprocess
import sys


def test_the_process_that_measures_memory_loads_no_library_that_it_measures() -> None:
    """If it loaded them, a single process would share their pages with it and seem to use half, unlike a cluster."""
    code = "import bench.memory, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert not {"torch", "numpy", "grpc", "pydantic", "tokenizers", "hack_kernels", "httpx"} & set(
        loaded.stdout.split()
    )
