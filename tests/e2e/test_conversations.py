"""Conversations over HTTP: turns go to nodes with their pages, send only new KV, and answer like a cold run."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_node.service import DecodeService
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.generate import generate
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.types import Request, Sampling
from prefill_node.fetch_choice import PrefixFetch
from prefill_node.service import PrefillService
from tests.e2e.in_process import in_process_cluster
from tests.kinds import in_a_cluster
from tests.pair import SHARING, TIMEOUT_S, prompt
from tests.polling import POLL_S
from tests.router.processes import ROUTERS, WORKERS
from tests.wires import WIRES_HERE

PI = 32
TOKENS = PI + 5
TURNS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random FP32 checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("turns") / "tiny", Tiny(max_context=1024))


@cache
def worker(folder: Path, codec: str) -> Worker:
    """The model, once per codec."""
    return load_worker(
        ModelConfig(path=str(folder), dtype="float32"), CodecConfig(name=codec, settings={"page_tokens": PI})
    )


def cold(worker: Worker, ids: tuple[int, ...]) -> list[int]:
    """The token ids of one process that serves the prompt alone."""
    sampling = Sampling(seed=0, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return [token.token_id for token in generate(worker, Request("cold", ids, sampling))]


async def say(client: httpx.AsyncClient, ids: tuple[int, ...], salt: str = "") -> list[int]:
    """One greedy turn over HTTP."""
    body = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body | ({"cache_salt": salt} if salt else {}))
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


async def converse(client: httpx.AsyncClient, worker: Worker, number: int, turns: int = TURNS) -> None:
    """All turns of one conversation."""
    ids = prompt(number, 2 * PI + number)
    for turn in range(turns):
        answer = await say(client, ids)
        assert answer == cold(worker, ids)
        ids += (*answer, *prompt(100 * number + turn, 7))


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a series over its labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("codec", in_a_cluster(SHARING))
@pytest.mark.parametrize("wire", WIRES_HERE)
async def test_turns_of_many_conversations_say_what_cold_runs_say(folder: Path, wire: str, codec: str) -> None:
    await hold_many_conversations(folder, wire, codec, workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["hack", DEFAULT_CODEC])
async def test_so_they_do_through_a_router_of_several_processes(folder: Path, codec: str) -> None:
    await hold_many_conversations(folder, "grpc", codec, workers=2)


async def hold_many_conversations(folder: Path, wire: str, codec: str, workers: int) -> None:
    """First run one conversation after another: each later turn finds its nodes idle, and all pages that earlier turns
    sealed are still there. Then run several at once, which may move to other nodes because of load."""
    made = worker(folder, codec)
    async with in_process_cluster(folder, made, wire, chunk_pages=2, workers=workers) as client:
        for number in (1, 2):
            await converse(client, made, number)
        starts = [2 * PI + number + turn * (TOKENS + 7) for number in (1, 2) for turn in range(1, TURNS)]
        assert await metric(client, "hackkv_kv_held_tokens_total") == sum((start - 8) // PI * PI for start in starts)
        assert await metric(client, "hackkv_dispatched_held_tokens_total") > 0
        await asyncio.gather(*(converse(client, made, number, turns=2) for number in range(3, 6)))
        assert await metric(client, "hackkv_prompt_tokens_recomputed_total") == 0


@WORKERS
async def test_tenants_do_not_share(folder: Path, workers: int) -> None:
    """Two tenants have the same conversation. The second finds no page of the first."""
    made = worker(folder, "hack")
    async with in_process_cluster(folder, made, "inproc", 2, num_prefill=1, num_decode=1, workers=workers) as client:
        ids = prompt(1, 3 * PI)
        for salt in "ab":
            await say(client, ids, salt)
            assert await metric(client, "hackkv_kv_held_tokens_total") == 0
            assert await metric(client, "hackkv_prefix_hits_total") == 0
        await say(client, ids, "a")
        assert await metric(client, "hackkv_kv_held_tokens_total") == 3 * PI


@ROUTERS
@pytest.mark.parametrize("codec", in_a_cluster(SHARING))
async def test_a_conversation_outlives_the_node_that_has_it(folder: Path, codec: str, workers: int) -> None:
    """Two turns answer like a cold run: the one under way when its decode node drains, and the one after."""
    made, nodes = worker(folder, codec), list[DecodeService]()
    async with in_process_cluster(folder, made, "grpc", 2, decode_nodes=nodes, workers=workers) as client:
        ids = prompt(5, 3 * PI + 1)
        ids += (*await say(client, ids), 7, 8)
        holder = max(nodes, key=lambda node: node.pool.kept.known)
        assert holder.pool.kept.known[0] > 3
        turn = asyncio.create_task(say(client, ids))
        while not holder.draining.is_set():
            await asyncio.sleep(0)
            if not (await holder.describe()).queued_tokens and not turn.done():
                continue  # the turn has not reached the node
            await holder.drain(0.0)
        answer = await turn
        assert answer == cold(made, ids)
        ids += (*answer, 9)
        assert await say(client, ids) == cold(made, ids)


@ROUTERS
@pytest.mark.parametrize("wire", WIRES_HERE)
async def test_another_prefill_node_gets_a_conversation_from_its_decode_node(
    folder: Path, wire: str, workers: int
) -> None:
    """The prefill node that has the conversation stops accepting requests. With every wire, fetches go over gRPC."""
    made, nodes, decode = worker(folder, "rot-k3v2"), list[PrefillService](), list[DecodeService]()
    always: dict[str, Any] = {"prefix_fetch": PrefixFetch.ALWAYS, "fetch_s": TIMEOUT_S}
    async with in_process_cluster(
        folder, made, wire, 2, num_decode=1, decode_nodes=decode, prefill_nodes=nodes, workers=workers, **always
    ) as client:
        ids = prompt(6, 3 * PI + 1)
        ids += (*await say(client, ids), 7, 8)
        async with asyncio.timeout(TIMEOUT_S):
            while not len(decode[0].inbox.lender.rows):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # no event reports a copy's end
        for node in nodes:
            if (await node.describe()).marks:
                await node.drain(0.0)
        assert await say(client, ids) == cold(made, ids)
        assert await metric(client, "hackkv_kv_fetched_tokens_total") == (3 * PI + 1 + TOKENS - 1) // PI * PI
        assert await metric(client, "hackkv_kv_fetched_bytes_total") > 0
