"""bench.gpu on tiny shapes, interpreted if there is no GPU, and from a checkout without installed packages."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.backend import TritonBackend

from bench.gpu.__main__ import WHEELS, Results
from bench.gpu.checks import checks
from bench.gpu.engine import CODECS, COPIES, fitting, recording, rows, wires
from bench.gpu.processes import Answer, Task, answers
from bench.gpu.shapes import Row
from bench.gpu.timing import measure
from hackkv.errors import ConfigError

ROOT = Path(__file__).parents[2]
PARTS = ("", ", eager", ", attention", ", pages fill", ", ahead")
"""The timed parts of a codec's step."""
TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.mark.slow
def test_the_bench_checks_every_kernel_and_writes_as_it_goes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": "kernels", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--budget", "2000", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert not results["failures"]
    assert results["checks_passed"] == len(list(checks(smoke=True, seed=0)))
    of_engine = ["step", "prompt", *COPIES, *["link"] * len(wires())]
    assert [row["what"] for row in results["rows"]] == ["decode", "seal", "seal", "rotation", "prefill", *of_engine]
    contenders = {"hack", "loads only", "compute only", "dequantize", "rot-k3v2", "rows", "bf16"}
    assert set(results["rows"][0]["us"]) == contenders
    assert "| decode | 128 tokens x 1, 1x4 heads |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_a_step_of_the_engine_is_timed_for_every_contender() -> None:
    task = next(rows(smoke=True))
    torch.manual_seed(task.seed)
    row = task.run(TritonBackend(torch.device("cpu")))
    assert isinstance(row, Row)
    assert set(row.us) == {*(f"{name}{part}" for name in CODECS for part in PARTS), "sdpa"}
    assert row.tokens_per_s == 2 / row.us[CODECS[0]] * 1e6
    assert len(row.notes) == len(CODECS)


def test_a_contender_that_does_not_fit_is_left_out_by_name() -> None:
    notes = list[str]()
    with fitting(notes, "fp16"):
        raise torch.OutOfMemoryError
    assert notes == ["fp16: does not fit memory"]


def test_a_device_that_cannot_record_is_measured_all_the_same() -> None:
    notes = list[str]()
    with recording(notes, "hack"):
        raise ConfigError("graphs: cuda:0 cannot record a decode step")
    assert notes == ["hack: graphs: cuda:0 cannot record a decode step"]


@pytest.mark.parametrize("cold", [True, False])
def test_what_is_timed_is_run(cold: bool) -> None:
    calls = list[int]()
    measure(lambda: calls.append(1), torch.device("cpu"), cold=cold)
    assert len(calls) == 2, "once to warm up, once to be timed"


@pytest.mark.slow
def test_the_engine_needs_no_wheel_that_the_bench_does_not_name() -> None:
    """The engine can be imported without the other requirements of hackkv."""
    here = needed_by(*WHEELS, "torch", "triton", "numpy")
    missing = needed_by("hackkv") - here - {"hackkv"}
    modules = [module for module, owners in packages_distributions().items() if {*map(normal, owners)} <= missing]
    assert "h11" in modules
    hidden = f"import sys; sys.modules.update(dict.fromkeys({modules})); import bench.gpu.engine"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def normal(name: str) -> str:
    """The normal form of a package name, which has several spellings."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(*names: str) -> set[str]:
    """The packages `names` and all that they need, without extras."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):
            waiting += [re.split(r"[^\w.-]", line)[0] for line in requires(name) or () if "extra ==" not in line]
    return found


@pytest.mark.slow
def test_a_seed_repeats_the_inputs_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs do not depend on the process or on earlier tasks."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "kernels"))
    seeded = Results({}, Path(), seed=3).seeded([Task("a", drawn), Task("b", drawn), Task("a", drawn)])
    first, other, again = (answer.result for answer in answers(seeded, 1, math.inf))
    assert first == again != other
    assert Results({}, Path(), seed=4).seeded([Task("a", drawn)])[0].seed != seeded[0].seed


def test_a_process_that_dies_or_never_ends_is_a_failure_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits are infinite or 0, so that the result does not depend on the machine's speed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "kernels"))
    answered, died = answers([Task("page", page_tokens), Task("death", die)], 1, math.inf)
    assert answered == Answer("page", 64)
    assert died == Answer("death", failure="its process died, exit code 7")
    (endless,) = answers([Task("endless", wait_forever)], 1, math.inf, limit_s=0)
    assert endless == Answer("endless", failure="no end within 0 s")
    assert list(answers([Task("late", page_tokens)], 1, until=0)) == []


def drawn(_: TritonBackend) -> float:
    return float(torch.rand(()))


def page_tokens(_: TritonBackend) -> int:
    return HackFormat(64, 64).page_tokens


def die(_: TritonBackend) -> None:
    os._exit(7)


def wait_forever(_: TritonBackend) -> None:
    threading.Event().wait()
