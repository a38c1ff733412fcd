"""Time of a prompt's chunk and of a recorded step on a GPU, kernel by kernel: `python -m bench.gpu.profile`.

Random weights in the shape of Llama-3.1-8B. It needs what the engine's rows of `bench.gpu` need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import torch
from hack_kernels import load
from hack_kernels.base import BackendUnavailable
from hack_kernels.triton.backend import TritonBackend
from torch.profiler import ProfilerActivity, profile

from bench.gpu.engine import CHUNK, PAGE, random_kv
from bench.gpu.models import LLAMA, random_model
from bench.passes import Passes
from hackkv.defaults import DEFAULT_CODEC

TOKENS: Final = 2**14
BATCH: Final = 32
LINES: Final = 16


def show(name: str, run: Callable[[], None]) -> None:
    """Print the kernels of one run that take longest, after one run that warms up."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
    whole = sum(each.self_device_time_total for each in kernels) / 1e3
    print(f"{name}: {whole:.2f} ms on the GPU, {sum(each.count for each in kernels)} kernels")
    for each in kernels[:LINES]:
        print(f"  {each.self_device_time_total / 1e3:8.3f} ms {each.count:5} x {each.key[:90]}")


def main() -> None:
    """Profile chunks of two codecs, then a step."""
    try:
        backend = load("triton")
    except BackendUnavailable as error:
        sys.exit(f"bench.gpu.profile: {error}")
    assert isinstance(backend, TritonBackend)
    model = random_model(LLAMA, TOKENS + 2 * PAGE, backend.device, backend.rows)
    for name in (DEFAULT_CODEC, "fp16"):
        chunk = Passes(*random_kv(model, name, TOKENS, 1, backend)).a_pass(TOKENS - CHUNK, CHUNK)
        show(f"{name}, {CHUNK} rows behind {TOKENS - CHUNK}", chunk)
        del chunk
    runner, pages = random_kv(model, DEFAULT_CODEC, TOKENS + PAGE, BATCH, backend, recorded=BATCH)
    runner.record()
    show(f"{DEFAULT_CODEC}, a recorded step of {BATCH} x {TOKENS}", Passes(runner, pages).a_step(BATCH, TOKENS + 1))


if __name__ == "__main__":
    main()
