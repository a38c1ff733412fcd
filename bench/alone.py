"""`python -m bench.alone MODEL CODEC DTYPE WEIGHTS`: one process that answers requests, for `bench.memory` to measure.

It loads the model, answers the requests of `bench.memory` and prints a line. After it has read a line, it gives memory
back as the processes of a cluster do, answers one more request, and prints another line. It ends when its standard
input does.
"""

from __future__ import annotations

import sys

from bench.memory import NEW_TOKENS, REQUESTS, prompt
from hackkv.config import CodecConfig, ModelConfig
from hackkv.heap import trim, unmap_code
from hackkv.model.generate import generate
from hackkv.model.worker import Worker, load_worker
from hackkv.types import Request, Sampling


def main(path: str, codec: str, dtype: str, weights: str) -> None:
    """Load the model, answer the requests, and stay until standard input ends."""
    model = ModelConfig(path=path, dtype=dtype, weights=weights, threads=1)
    worker = load_worker(model, CodecConfig(name=codec))
    for seed in range(REQUESTS):
        answer(worker, seed)
    print("answered", flush=True)
    if sys.stdin.readline():
        trim()
        unmap_code()
        answer(worker, REQUESTS)
        trim()
        print("given back", flush=True)
        sys.stdin.read()


def answer(worker: Worker, seed: int) -> None:
    """Answer request number `seed`."""
    sampling = Sampling(seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)
    generate(worker, Request(str(seed), tuple(prompt(seed)), sampling))


if __name__ == "__main__":
    main(*sys.argv[1:])
