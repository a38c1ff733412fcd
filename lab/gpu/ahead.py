"""Compile, without a GPU, what a node on one compiles before its port opens:

    TRITON_CACHE_DIR=cache python -m lab.gpu.ahead smollm2 --arch 90 --codec rot-k3v2

The cache is valid on machines with the same Triton, to the byte of its files. Nothing is launched.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.split import block_sizes
from torch import Tensor

from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.warm import warm_up
from hackkv.model.worker import plan_on
from lab.gpu.absent import target_of


@contextmanager
def compiling_for(arch: int) -> Iterator[list[Any]]:
    """While the context is open, a launch only compiles its kernel, and its output is zeros. Yields the kernels that
    were compiled or found in the cache, in the order of launches."""
    compiled = list[Any]()

    def compile_only(launch: Launch) -> None:
        compiled.append(launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options))
        if isinstance(out := launch.arguments.get("out"), Tensor):
            out.zero_()

    run = Launch.run
    Launch.run = compile_only  # type: ignore[assignment, method-assign]
    try:
        with target_of(arch):
            yield compiled
    finally:
        Launch.run = run  # type: ignore[method-assign]


def main() -> None:
    """Warm up with weights and KV in host memory, and print the number of kernels."""
    parser = argparse.ArgumentParser(prog="python -m lab.gpu.ahead", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="as `hackkv serve` takes it")
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its point, such as 80 or 90")
    parser.add_argument("--codec", default=DEFAULT_CODEC)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most", type=int, default=64, help="sequences of a batch")
    options = parser.parse_args()
    model = ModelConfig.model_validate({"path": options.model, "dtype": options.dtype})
    here = TritonBackend(torch.device("cpu"))
    worker = plan_on(here, "cuda", model, CodecConfig(name=options.codec)).worker()
    with compiling_for(options.arch) as compiled:
        warm_up(worker, block_sizes(options.most))
    print(f"{len({each.hash for each in compiled})} kernels for sm_{options.arch}, {len(compiled)} launches")


if __name__ == "__main__":
    main()
