"""Compile, without a GPU, what a node on one compiles before its port opens:

    TRITON_CACHE_DIR=cache python -m lab.gpu.ahead smollm2 --arch 90 --codec rot-k3v2

The cache is valid on machines with the same Triton, to the byte of its files. Nothing is launched.
"""

from __future__ import annotations

import argparse

import torch
from hack_kernels.triton.ahead import TritonCompiler
from hack_kernels.triton.backend import TritonBackend

from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.warm import call_all, now_and_then
from hackkv.model.worker import plan_on
from lab.gpu.absent import target_of


def main() -> None:
    """Call everything with weights and KV in host memory, and print the number of kernels."""
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
    compiler = TritonCompiler()
    with target_of(options.arch), compiler.compiling(now_and_then(print)) as compiled:
        call_all(worker, compiler.batches(options.most))
    print(f"{len({each.hash for each in compiled})} kernels for sm_{options.arch}, {len(compiled)} launches")


if __name__ == "__main__":
    main()
