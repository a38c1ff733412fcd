"""hackkv on one request: router, one prefill and one decode node as processes that share the cores, through HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.peers.model import prompt_ids
from hackkv.cluster import ClusterPlan, running

TIMEOUT_S = 900.0
KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """One request, as its client and the router saw it; times in seconds."""

    jct_s: float
    stages: dict[str, float]
    sub_stages: dict[str, float]
    wire_bytes: int
    fp16_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Plain fields."""
        return {name: getattr(self, name) for name in self.__slots__}


def middle(runs: list[Run]) -> Run:
    """The run of median JCT (the lower one of two): its stages sum to its own time."""
    wanted = median(sorted(run.jct_s for run in runs)[: len(runs) // 2 * 2 + len(runs) % 2])
    return min(runs, key=lambda run: abs(run.jct_s - wanted))


def serve(
    checkpoint: Path, codec: Mapping[str, Any], sizes: list[tuple[int, int]], rounds: int, threads: int
) -> list[Run]:
    """Start a cluster with `codec` and answer a request of each (prompt, output) size `rounds` times."""
    return asyncio.run(_serve(checkpoint, codec, sizes, rounds, threads))


async def _serve(
    checkpoint: Path, codec: Mapping[str, Any], sizes: list[tuple[int, int]], rounds: int, threads: int
) -> list[Run]:
    worker = {"model": {"path": str(checkpoint), "threads": threads}, "codec": dict(codec), "kv_bytes": KV_BYTES}
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": str(checkpoint)}
    plan = ClusterPlan(router, worker, num_prefill=1, num_decode=1)
    async with (
        running(plan, lambda _: None) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client,
    ):
        await _ask(client, 64, 4)  # the first request loads what is loaded on first use
        runs = []
        for prompt, tokens in sizes:
            runs.append(middle([await _ask(client, prompt, tokens, salt=str(nth)) for nth in range(rounds)]))
    return runs


async def _ask(client: httpx.AsyncClient, prompt: int, tokens: int, salt: str = "") -> Run:
    """One greedy completion; a salt of its own keeps it from reusing the pages of an earlier round."""
    began = asyncio.get_running_loop().time()
    answer = await client.post(
        "/v1/completions",
        json={
            "prompt": prompt_ids(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_stages": True,
            # "cache_salt": salt,
        },
    )
    jct_s = asyncio.get_running_loop().time() - began
    answer.raise_for_status()
    report = answer.json()["hackkv"]
    kv = report["kv"]
    wire = sum(kv["bytes_by_plane"].values()) + kv["header_bytes"]
    return Run(jct_s, report["stages"], report["sub_stages"], wire, kv["fp16_bytes"])
