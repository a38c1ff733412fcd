"""One cluster under load: three times as many clients as a decode step takes, each with one request after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter

from app.cluster import ClusterPlan, LocalCluster, running
from bench.cluster import dead, describe, metrics, processor_s, total, until
from bench.connection import Connection
from bench.swap.workload import LOAD, MAX_BATCH, Job, Memory
from hackkv.errors import DeadlineExceeded
from hackkv.nodes import NodeInfo
from hackkv.types import Role

RAMP_S, WARM_S, WINDOW_S = 10.0, 40.0, 10.0
"""Clients join one after another; all are there after the warm-up."""
REQUEST_S = 900.0
"""A request that takes longer counts as hung."""
BASELINE_S = 10.0
COUNTERS = ("hackkv_swap_out_total", "hackkv_swap_in_total", "hackkv_swapped_seconds_total")


@dataclass(slots=True)
class Run:
    """The measurements of one cluster."""

    windows: list[float] = field(default_factory=list)
    """Tokens per second of the decode node, window by window."""
    batches: list[int] = field(default_factory=list)
    """Sequences in a step, read once a second."""
    decode_cores: float = 0.0
    """Processor seconds of the decode node per second."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Number of the request -> its tokens."""
    served: int = 0
    slowest_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    counters: dict[str, float] = field(default_factory=dict)
    recomputed_tokens: float = 0.0
    dead: list[str] = field(default_factory=list)
    """Names of the processes that ended."""

    async def serve(
        self, url: str, work: Sequence[Job], order: Iterator[int], stop: asyncio.Event, begin_s: float
    ) -> None:
        """Be one client: after `begin_s`, send one request after another and read each answer to its end."""
        await asyncio.sleep(begin_s)
        while not stop.is_set():
            index, began = next(order), perf_counter()
            try:
                async with asyncio.timeout(REQUEST_S), Connection.to(url) as connection:
                    answer = await connection.ask("POST", "/v1/completions", work[index].body())
            except TimeoutError:
                self.failures[f"hung for {REQUEST_S:g} s"] += 1
                continue
            except OSError as error:
                self.failures[f"connection: {error}"] += 1
                await asyncio.sleep(1.0)
                continue
            self.slowest_s = max(self.slowest_s, perf_counter() - began)
            if answer.status != 200:
                self.failures[f"{answer.status}: {answer.body[:200].decode(errors='replace')}"] += 1
                continue
            self.served += 1
            tokens = answer.json()["choices"][0]["token_ids"]
            if self.outputs.setdefault(index, tokens) != tokens:
                self.failures["a request got other tokens the second time"] += 1


def plan(model: str, codec: str, memory: Memory) -> ClusterPlan:
    """The plan of one prefill and one decode node with one compute thread each."""
    worker = {"model": {"path": model, "dtype": "float32", "threads": 1}, "codec": {"name": codec, "allow_loss": True}}
    # The test is about memory. A busy machine must not cost a node its lease, and at this load requests wait long.
    waits = dict.fromkeys(("queue_s", "prefill_s", "landed_s", "swapped_s"), REQUEST_S)
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model, "lease_ttl_s": 10.0, "deadlines": waits}
    decode = {"kv_bytes": memory.pages * memory.page_bytes, "max_sequences": memory.slots, "max_batch": MAX_BATCH}
    return ClusterPlan(router, worker, 1, 1, decode=decode)


async def run(plan: ClusterPlan, work: Sequence[Job], seconds: float, window_done: Callable[[], None]) -> Run:
    """Load a cluster, measure while all clients are there, let every request end, and check that nothing is held."""
    result = Run()
    async with running(plan, lambda _: None) as cluster:
        stop, order = asyncio.Event(), cycle(range(len(work)))
        count = LOAD * MAX_BATCH
        clients = [
            asyncio.create_task(result.serve(cluster.url, work, order, stop, RAMP_S * client / count))
            for client in range(count)
        ]
        try:
            await asyncio.sleep(WARM_S)
            await _measure(cluster, result, seconds, window_done)
            stop.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        await _settle(cluster, result)
    return result


async def _measure(cluster: LocalCluster, result: Run, seconds: float, window_done: Callable[[], None]) -> None:
    first_s, first = perf_counter(), processor_s(cluster)["decode-0"]
    before, began = await _generated(cluster), perf_counter()
    for _ in range(windows(seconds)):
        while perf_counter() - began < WINDOW_S:
            await asyncio.sleep(1.0)
            result.batches.append((await _decode(cluster)).running)
        after, ended = await _generated(cluster), perf_counter()
        result.windows.append((after - before) / (ended - began))
        before, began = after, ended
        window_done()
    result.decode_cores = (processor_s(cluster)["decode-0"] - first) / (perf_counter() - first_s)


async def _settle(cluster: LocalCluster, result: Run) -> None:
    """Wait until everything is given back, then read the nodes' own counters."""

    async def idle() -> bool:
        info = await _decode(cluster)
        return info.free_pages == info.total_pages and not dict(info.stats)["hackkv_host_pool_bytes"]

    try:
        await until(idle, BASELINE_S, "an idle decode node")
    except TimeoutError as error:
        result.failures[str(error)] += 1
    page, stats = await metrics(cluster.url), dict((await _decode(cluster)).stats)
    result.counters = {name: stats[name] for name in COUNTERS}
    recomputed = ("hackkv_prompt_tokens_recomputed_total", "hackkv_replayed_tokens_total")
    result.recomputed_tokens = sum(total(page, name) for name in recomputed)
    result.dead = dead(cluster)


def windows(seconds: float) -> int:
    """Number of windows in `seconds`."""
    return max(1, round(seconds / WINDOW_S))


async def _decode(cluster: LocalCluster) -> NodeInfo:
    """The decode node's report. A busy node is asked again until it answers."""
    while True:
        with contextlib.suppress(DeadlineExceeded):
            (info,) = [info for info in await describe(cluster) if info.role is Role.DECODE]
            return info


async def _generated(cluster: LocalCluster) -> float:
    return dict((await _decode(cluster)).stats)["hackkv_generated_tokens_total"]
