"""bench.gpu on tiny shapes under Triton's interpreter, from a checkout without anything that hackkv installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def test_the_bench_checks_every_kernel_and_writes_as_it_goes(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": "kernels", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--budget", "2000", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["checks_passed"] == 9
    assert not results["failures"]
    assert [row["what"] for row in results["rows"]] == ["decode", "seal", "seal", "prefill"]
    assert set(results["rows"][0]["us"]) == {"hack", "loads only", "compute only", "dequantize", "rows", "bf16"}
    assert "| decode | 128 tokens x 1, 1x4 heads |" in (tmp_path / "gpu.md").read_text()
