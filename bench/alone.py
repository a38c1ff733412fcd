"""`python -m bench.alone MODEL CODEC DTYPE WEIGHTS`: one process that answers requests, for `bench.memory` to measure.

It loads the model, answers the requests of `bench.memory`, prints a line, and ends when its standard input does.
"""

from __future__ import annotations

import sys

from bench.memory import NEW_TOKENS, REQUESTS, prompt
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.worker import load_worker
from hackkv.types import Request, Sampling


def main(path: str, codec: str, dtype: str, weights: str) -> None:
    """Load, answer, and stay."""
    model = ModelConfig(path=path, dtype=dtype, weights=weights, threads=1)
    worker = load_worker(model, CodecConfig(name=codec))
    for seed in range(REQUESTS):
        sampling = Sampling(seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)
        generate(worker, Request(str(seed), tuple(prompt(seed)), sampling))
    print("answered", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
