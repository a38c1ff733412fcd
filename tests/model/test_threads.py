"""A node uses the configured number of threads of torch and of the C++ kernels, however many the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hackkv.model.tiny import Tiny
from tests.model.conftest import MakeTiny

ENGINE = """
import sys, threading
from pathlib import Path
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.worker import load_worker
from hackkv.types import Request, Sampling

def tasks():
    return len(list(Path("/proc/self/task").iterdir()))

path, threads, codec = sys.argv[1:]
worker = load_worker(ModelConfig(path=path, threads=int(threads)), CodecConfig(name=codec))
before = tasks()

def run():
    prompt = tuple(3 + i % 500 for i in range(700))
    generate(worker, Request("r", prompt, Sampling(seed=0, max_tokens=2, temperature=0.0, ignore_eos=True)))
    print("started", tasks() - before - 1)

engine = threading.Thread(target=run)  # as a node does: not the thread that loaded the model
engine.start()
engine.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted through Linux's /proc")
@pytest.mark.parametrize(("threads", "codec"), [(1, "hack"), (3, "fp16")])
def test_the_engine_starts_no_more_threads_than_it_was_given(
    make_tiny: MakeTiny, tmp_path: Path, threads: int, codec: str
) -> None:
    """OpenMP and our pool each keep threads - 1 helpers. One set sleeps while the other computes.

    Only the second process counts: the first one times products on OpenMP's threads while it loads the model, and
    writes the result to the cache.
    """
    model = make_tiny(Tiny(hidden=512, heads=8, kv_heads=4, ffn=512))
    environment = os.environ | {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "PASSIVE", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", ENGINE, str(model), str(threads), codec],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    started = int(found.stdout.split("started ")[1])
    assert (started == 0) if threads == 1 else (threads - 1 < started <= 2 * (threads - 1))
