"""`python -m bench.durations --out FILE.json`: durations of this machine, for `profile` in a specification of the
simulator.

It times the model's own passes and steps over a grid, medians of several, with real KV in the codec's pages. The parts
of a node around them (event loop, wire, router) are not included. The catalogue's GPUs are rooflines. To add a machine
of your own, run this command and add a row with its memory, network and price to the specification's `catalogue`.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bench.environment import as_a_role
from bench.passes import Passes, median_s
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker, load_worker
from sim.costs import Grid, Profile

TOKENS = (16, 63, 64, 127, 128, 255, 256, 512)
"""Points just below and at the row counts from which on a library may multiply (`hackkv.model.products`). Durations
jump there, and a line between points farther apart is wrong by up to twice."""
BATCHES = (1, 2, 4, 5, 8, 16)
"""Products take rows in blocks, so the time of a step is not linear from one to four to sixteen."""
CONTEXTS = (64, 512, 1024)
REPEATS = 5
SECONDS = 0.2
"""Each point is repeated for at least this time, since a few short steps depend on what ran before them."""


def measure(
    worker: Worker, tokens: Sequence[int], batches: Sequence[int], contexts: Sequence[int], repeats: int = REPEATS
) -> Profile:
    """Time passes of `tokens` tokens after `contexts` rows, and steps of `batches` sequences with `contexts` rows."""
    page = worker.codec.page_tokens
    most = max(contexts) + max(tokens) + 1
    pages = -(-most // page)
    runner = ModelRunner(worker.model, worker.codec, pages * max(batches), max(batches))
    passes = Passes(runner, pages)
    passes.fill(1, max(contexts))
    quantize, whole = worker.codec.quantize_s, perf_counter()
    prefill = [[median_s(passes.a_pass(start, count), repeats, SECONDS) for start in contexts] for count in tokens]
    passes_s = perf_counter() - whole
    quantize_share = (worker.codec.quantize_s - quantize) / passes_s
    passes.fill(max(batches), max(contexts))
    attend, corrected, whole = worker.codec.attend_s, worker.codec.approximation_s, perf_counter()
    # The context ends with full pages, so that no page fills up during the steps, as in nearly all steps.
    decode = [
        [median_s(passes.a_step(batch, context + 1), repeats, SECONDS) for context in contexts] for batch in batches
    ]
    steps_s = perf_counter() - whole
    return Profile(
        machine=f"{platform.machine()}, {worker.kernels}",
        model=worker.name,
        codec=worker.codec.name,
        prefill=Grid(rows=tuple(tokens), columns=tuple(contexts), seconds=tuple(map(tuple, prefill))),
        decode=Grid(rows=tuple(batches), columns=tuple(contexts), seconds=tuple(map(tuple, decode))),
        quantize_share=min(1.0, quantize_share),
        attend_share=min(1.0, (worker.codec.attend_s - attend) / steps_s),
        approximation_share=min(1.0, (worker.codec.approximation_s - corrected) / steps_s),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the profile."""
    parser = argparse.ArgumentParser("python -m bench.durations", description=__doc__)
    parser.add_argument("--model", default="", help="folder, GGUF file or hub name; default: the shipped model")
    parser.add_argument("--codec", default=DEFAULT_CODEC, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; default: as torch chooses")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args(arguments)
    worker = load_worker(
        ModelConfig(path=args.model, dtype=args.dtype, threads=args.threads), CodecConfig(name=args.codec)
    )
    profile = measure(worker, TOKENS, BATCHES, CONTEXTS)
    args.out.write_text(profile.model_dump_json(indent=1), encoding="utf-8")
    print(f"wrote {args.out}: {profile.model}, {profile.codec}, {profile.machine}")
    return 0


if __name__ == "__main__":
    as_a_role()
    sys.exit(main())
