"""`python -m bench.evictions smollm2`: the cost of an eviction while a prompt is computed, and its savings afterwards.

One prompt of random tokens goes through the model's own passes, in chunks, into a codec's real pages. Then tokens are
decoded on the rows that stayed. Codecs take turns. The table has seconds of the prompt, the time to choose and seal the
rows that stay, and the median of a decode step. Wire and event loop are not included; bytes are those of a handoff.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Final

import torch

from bench.environment import as_a_role
from hackkv.batch import Span
from hackkv.codec import rows_held
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker, load_worker

CODECS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "fp16": ("fp16", {}),
    "streamingllm": ("streamingllm", {}),
    "snapkv": ("snapkv", {}),
    "h2o": ("h2o", {}),
    "mpcache-static": ("mpcache", {"select": "100%"}),
    "mpcache": ("mpcache", {}),
    "rot-k4v4": ("rot-k4v4", {}),
    "snapkv-rot-k4v4": ("snapkv", {"of": "rot-k4v4"}),
}
CHUNK: Final = 256
STEPS: Final = 32


def measure(worker: Worker, tokens: int, steps: int) -> tuple[float, float, float]:
    """Seconds of the prompt and of the eviction, and the median seconds of a decode step."""
    pages = tuple(range(worker.layout.pages(tokens + steps)))
    runner = ModelRunner(worker.model, worker.codec, len(pages), 1)
    ids = torch.randint(3, worker.model.spec.vocab, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    began = perf_counter()
    for start in range(0, tokens, CHUNK):
        part = ids[start : start + CHUNK]
        runner.forward([Span(0, start, len(part), pages, prompt=tokens)], part, wanted=[1])
    computed = perf_counter()
    held = runner.end_prompt(Span(0, 0, tokens, pages))
    evicted, took = perf_counter(), list[float]()
    for row in range(held, held + steps):
        before = perf_counter()
        runner.forward([Span(0, row, 1, pages, evicted=tokens - held)], [5])
        took.append(perf_counter() - before)
    return computed - began, evicted - computed, median(took)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.evictions", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="folder, GGUF file, hub name or smollm2; default: shipped")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    model = ModelConfig(path=options.model, dtype="float32", threads=options.threads)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CODECS}
    sizes = dict[str, int]()
    with torch.inference_mode():
        for _ in range(options.repeats):
            for row, (name, settings) in CODECS.items():
                worker = load_worker(model, CodecConfig(name=name, settings=dict(settings)))
                sizes[row] = worker.footprint.wire_bytes(rows_held(worker.codec, options.tokens))
                found[row].append(measure(worker, options.tokens, STEPS))
    print(f"{worker.name}, {worker.kernels}, {options.threads} thread; {options.tokens} tokens")
    print("| codec | MB of a handoff | prompt, s | evicting, ms | decode step, ms |\n|---|---|---|---|---|")
    for row, times in found.items():
        prompt_s, evict_s, step_s = (median(column) for column in zip(*times, strict=True))
        print(f"| `{row}` | {sizes[row] / 1e6:.1f} | {prompt_s:.1f} | {1e3 * evict_s:.0f} | {1e3 * step_s:.1f} |")
    return 0


if __name__ == "__main__":
    as_a_role()
    sys.exit(main())
