"""How many prefixes a prefill node holds per byte, and what that is worth: `python -m bench.prefix`.

Prompts begin with one of `--prefixes` common beginnings, drawn at random, and end differently. Four nodes serve the
same prompts, one at a time: two codecs, each with and without prefix reuse. All nodes have the same bytes of page pool
and host memory. Memory does not hold all beginnings, so the least recently used ones are dropped before they are needed
again. Nodes take turns with every prompt, so ratios of times hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.cluster import TINY, load_note
from bench.environment import as_a_role
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.tiny import write_tiny
from hackkv.model.worker import load_worker
from hackkv.nodes import NodeIdentity
from hackkv.types import Prefilled, PrefillJob, Request, Sampling
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from transport.closing import closing
from transport.wires import Loopback

CODECS = ("fp16", "hack")
SUFFIX_TOKENS = 40


@dataclass(slots=True)
class Node:
    """One prefill node, and the times of its prompts."""

    codec: str
    reuse: bool
    service: PrefillService
    first_token_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)

    async def serve(self, name: str, ids: tuple[int, ...]) -> None:
        """Compute a prompt up to its first token, and record its time."""
        request = Request(name, ids, Sampling(seed=0, max_tokens=1, temperature=0.0))
        began = perf_counter()
        async with closing(self.service.prefill(PrefillJob(request, name, 0, handoff=False))) as events:
            prefilled = await anext(events)
        assert isinstance(prefilled, Prefilled)
        self.first_token_s.append(perf_counter() - began)
        self.cached_tokens.append(len(ids) - prefilled.computed_tokens)


def make_node(model: str, codec: str, *, reuse: bool, kv_bytes: int, host_bytes: int) -> Node:
    """Make a prefill node in this process."""
    worker = load_worker(ModelConfig(path=model, dtype="float32", threads=1), CodecConfig(name=codec))
    service = PrefillService(
        NodeIdentity(codec, codec, "1"),
        worker,
        Loopback("inproc").sender(),
        worker.pages_in(kv_bytes),
        PrefillSettings(max_prompts=4, host_bytes=host_bytes, prefix_cache=reuse),
    )
    return Node(codec, reuse, service)


def token_ids(seed: int, count: int) -> tuple[int, ...]:
    """Random ids of the tiny vocabulary, without special tokens."""
    return tuple(random.Random(seed).choices(range(3, 500), k=count))


async def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Serve every prefix once, then the load; returns the report."""
    kv_bytes, host_bytes = int(options.kv_mib * 2**20), int(options.host_mib * 2**20)
    nodes = [
        make_node(model, codec, reuse=reuse, kv_bytes=kv_bytes, host_bytes=host_bytes)
        for codec in CODECS
        for reuse in (True, False)
    ]
    prefixes = [token_ids(seed, options.prefix_tokens) for seed in range(options.prefixes)]
    draws = random.Random(options.seed)
    order = [*range(options.prefixes), *draws.choices(range(options.prefixes), k=options.requests)]
    for number, prefix in enumerate(order):
        ids = prefixes[prefix] + token_ids(10_000 + number, SUFFIX_TOKENS)
        turn = number % len(nodes)
        for node in nodes[turn:] + nodes[:turn]:
            await node.serve(f"r{number}", ids)
    rows = [await describe(node, options, kv_bytes + host_bytes) for node in nodes]
    held = {(row["codec"], row["prefix_cache"]): row["prefixes_held"] for row in rows}
    ratios = {
        "prefixes per byte, hack / fp16": held["hack", True] / held["fp16", True],
        "time to first token, hack with reuse / without": ratio(nodes, ("hack", True), ("hack", False), options),
        "time to first token, fp16 with reuse / without": ratio(nodes, ("fp16", True), ("fp16", False), options),
    }
    for node in nodes:
        await node.service.close()
    settings = vars(options) | {"out": str(options.out or "")}
    return {"machine": load_note(), "settings": settings, "nodes": rows, "ratios": ratios}


async def describe(node: Node, options: argparse.Namespace, memory_bytes: int) -> dict[str, Any]:
    """The row of one node: prefixes in its memory, how often prompts found them, and times of prompts."""
    info = await node.service.describe()
    stats = dict(info.stats)
    prefix_pages = options.prefix_tokens // info.page_tokens
    held = (stats["hackkv_prefix_pages"] + stats["hackkv_prefix_host_pages"]) / prefix_pages
    cached, times = node.cached_tokens[-options.requests :], node.first_token_s[-options.requests :]
    hits = [seconds for seconds, tokens in zip(times, cached, strict=True) if tokens]
    misses = [seconds for seconds, tokens in zip(times, cached, strict=True) if not tokens]
    return {
        "codec": node.codec,
        "prefix_cache": node.reuse,
        "prefixes_held": held,
        "prefixes_per_mib": held / (memory_bytes / 2**20),
        "bytes_per_prefix": memory_bytes / held if held else None,
        "hit_rate_tokens": sum(cached) / (options.requests * options.prefix_tokens),
        "evictions": stats["hackkv_prefix_evictions_total"],
        "first_token_ms": {"mean": mean_ms(times), "hit": mean_ms(hits), "miss": mean_ms(misses)},
    }


def ratio(nodes: Sequence[Node], one: tuple[str, bool], other: tuple[str, bool], options: argparse.Namespace) -> float:
    """Median over prompts of the ratio of their times on two nodes."""
    times = {(node.codec, node.reuse): node.first_token_s[-options.requests :] for node in nodes}
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def mean_ms(seconds: Sequence[float]) -> float | None:
    """Mean in milliseconds; None without values."""
    return 1e3 * statistics.fmean(seconds) if seconds else None


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--kv-mib", type=float, default=4.0, help="page pool, in MiB")
    parser.add_argument("--host-mib", type=float, default=12.0, help="host memory, in MiB")
    parser.add_argument("--prefixes", type=int, default=120)
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=160, help="prompts after each prefix was seen once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the report there too")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        report = asyncio.run(measure(options, str(write_tiny(Path(folder), TINY))))
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    as_a_role()
    main()
