"""Where a prompt's time goes: `python -m bench.operations [MODEL] [--tokens N] [--threads N] [--out docs]`.

One process computes a prompt in passes of 512 rows, as a prefill node does, without the node around it. Each call of an
operation on rows or pages is timed. What is left is Python's: the model, the codec, and what torch copies for them.
Medians of several prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

from hack_kernels.block_weight import BlockWeight

from bench.cluster import load_note
from bench.environment import as_a_role
from bench.passes import Passes
from bench.sections import write_section
from hackkv.codecs.paged import PagedCodec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker, load_worker
from measure.accuracy.machine import this_machine
from prefill_node.config import CHUNK_TOKENS

ROUNDS: Final = 5
HEAD: Final = "| operation | seconds | share | calls |"
REST: Final = "between operations"


class Clock:
    """Seconds and calls by operation. Calls within another operation belong to that one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inside = False

    def timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """`operation` with a timer around each call."""

        @wraps(operation)
        def call(*args: Any, **named: Any) -> Any:
            if self._inside:
                return operation(*args, **named)
            self._inside, began = True, perf_counter()
            try:
                return operation(*args, **named)
            finally:
                label = _label(name, args)
                self.seconds[label] += perf_counter() - began
                self.calls[label] += 1
                self._inside = False

        return call


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.operations", description="Where a prompt's time goes.")
    parser.add_argument("model", nargs="?", default="", help="as for hackkv serve; default: the shipped model")
    parser.add_argument("--codec", default=DEFAULT_CODEC, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="compute threads; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    began = load_note()
    worker = load_worker(ModelConfig(path=args.model, threads=args.threads), CodecConfig(name=args.codec))
    lines = table(measure(worker, args.tokens))
    print(HEAD, *lines, sep="\n")
    if args.out:
        said = " ".join(("python -m bench.operations", *sys.argv[1:]))
        where = f"{this_machine('', args.threads).cpu}, {worker.kernels}, {began}"
        about = f"`{said}` · {worker.name}, codec {args.codec}, {args.tokens} tokens, {args.threads} threads; {where}"
        text = "\n".join(("## Where a prompt's time goes", "", about, "", HEAD, "|" + "---|" * 4, *lines))
        write_section(args.out, "operations", text, {"where": where, "rows": lines})


def measure(worker: Worker, tokens: int) -> list[tuple[float, Clock]]:
    """The seconds of each of several prompts of `tokens` tokens, and those of their operations."""
    pages = -(-tokens // worker.codec.page_tokens) + 1
    passes = Passes(ModelRunner(worker.model, worker.codec, pages, 1), pages)
    parts = [passes.a_pass(start, min(CHUNK_TOKENS, tokens - start)) for start in range(0, tokens, CHUNK_TOKENS)]
    found = []
    for _ in range(ROUNDS + 1):
        clock = Clock()
        with timing(worker, clock):
            began = perf_counter()
            for part in parts:
                part()
            found.append((perf_counter() - began, clock))
    return found[1:]  # the first prompt warms up


@contextmanager
def timing(worker: Worker, clock: Clock) -> Iterator[None]:
    """Time all operations of the worker's kernels."""
    assert isinstance(worker.codec, PagedCodec)
    classes = {type(worker.model.kernels), *(type(kept.kernels) for kept in worker.codec.layers)}
    with ExitStack() as patches:
        for each in classes:
            for name in dir(each):
                operation = getattr(each, name)
                if not name.startswith("_") and callable(operation):
                    patches.enter_context(patch.object(each, name, clock.timed(name, operation)))
        yield


def table(found: list[tuple[float, Clock]]) -> list[str]:
    """Lines of the table, the longest operation first."""
    whole = median(seconds for seconds, _ in found)
    names = {name for _, clock in found for name in clock.seconds}
    seconds = {name: median(clock.seconds[name] for _, clock in found) for name in names}
    calls = {name: found[0][1].calls[name] for name in names}
    seconds[REST], calls[REST] = median(whole_s - sum(clock.seconds.values()) for whole_s, clock in found), 0
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    lines = [f"| {name} | {took:.3f} | {took / whole:.1%} | {calls[name] or ''} |" for name, took in rows]
    return [*lines, f"| all | {whole:.3f} | | |"]


def _label(name: str, args: tuple[Any, ...]) -> str:
    """The operation's name, with the shape of a weight that it multiplies."""
    weights = [each for each in args if isinstance(each, BlockWeight)]
    return f"{name} {list(weights[0].shape)}" if weights else name


if __name__ == "__main__":
    as_a_role()
    main()
