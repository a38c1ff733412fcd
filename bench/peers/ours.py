"""hackkv on one request: router, one prefill and one decode node as processes that share the cores, through HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.cluster import ClusterPlan, running
from bench.peers.model import prompt_ids

TIMEOUT_S = 900.0
KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """The times of one request, as its client and the router saw them, in seconds."""

    jct_s: float
    stages: dict[str, float]
    sub_stages: dict[str, float]
    wire_bytes: int
    fp16_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The run as plain fields."""
        return {name: getattr(self, name) for name in self.__slots__}


def middle(runs: Sequence[Run]) -> Run:
    """The run of median JCT (the faster one of two). A whole run is taken, so its stages sum to its own time."""
    return sorted(runs, key=lambda run: run.jct_s)[(len(runs) - 1) // 2]


def serve(
    checkpoint: Path,
    codec: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    threads: int,
    done: Callable[[int, Run], None],
) -> None:
    """Start a cluster with `codec`, and answer one request of `tokens` tokens for each prompt, one at a time.

    `done` is called with the prompt's length and the result of each request as it ends.
    """
    asyncio.run(_serve(checkpoint, codec, prompts, tokens, threads, done))


def serve_together(
    checkpoint: Path, codec: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: int, threads: int
) -> float:
    """Start a cluster, ask for `tokens` tokens for each prompt, all at once, and return the seconds until all ended."""
    return asyncio.run(_serve_together(checkpoint, codec, prompts, tokens, threads))


async def _serve(
    checkpoint: Path,
    codec: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    threads: int,
    done: Callable[[int, Run], None],
) -> None:
    async with _cluster(checkpoint, codec, threads) as client:
        for nth, prompt in enumerate(prompts):
            done(len(prompt), await _ask(client, prompt, tokens, str(nth)))


async def _serve_together(
    checkpoint: Path, codec: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: int, threads: int
) -> float:
    async with _cluster(checkpoint, codec, threads) as client:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(_ask(client, prompt, tokens, str(nth)) for nth, prompt in enumerate(prompts)))
        return asyncio.get_running_loop().time() - began


@asynccontextmanager
async def _cluster(checkpoint: Path, codec: Mapping[str, Any], threads: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a new cluster that has answered once, so everything that is loaded on first use is loaded."""
    lossy = {**codec, "allow_loss": True}  # weights may be random, and the quality of answers is not measured
    worker = {"model": {"path": str(checkpoint), "threads": threads}, "codec": lossy, "kv_bytes": KV_BYTES}
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": str(checkpoint)}
    plan = ClusterPlan(router, worker, num_prefill=1, num_decode=1)
    async with (
        running(plan, lambda _: None) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client,
    ):
        await _ask(client, prompt_ids(64), 4, "warm")
        yield client


async def _ask(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, salt: str) -> Run:
    """One greedy completion. Its own salt keeps it from reusing the pages of an earlier one."""
    began = asyncio.get_running_loop().time()
    answer = await client.post(
        "/v1/completions",
        json={
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_stages": True,
            "cache_salt": salt,
        },
    )
    jct_s = asyncio.get_running_loop().time() - began
    answer.raise_for_status()
    report = answer.json()["hackkv"]
    kv = report["kv"]
    wire = sum(kv["bytes_by_plane"].values()) + kv["header_bytes"]
    return Run(jct_s, report["stages"], report["sub_stages"], wire, kv["fp16_bytes"])
