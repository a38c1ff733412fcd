"""The scripted nodes of `bench.router`: a transfer's tokens come when its KV has landed, from two processes too."""

from __future__ import annotations

import asyncio

import pytest

from bench.router.cluster import running
from bench.router.nodes import PacedDecode, PacedPrefill
from bench.router.streams import Times, anew, stream
from hackkv.packaged import SHIPPED
from hackkv.types import (
    Decoded,
    DecodeJob,
    HandedOff,
    Landed,
    Prefilled,
    PrefillJob,
    Request,
    Reserved,
    Role,
    Sampling,
    Token,
)
from transport.closing import closing

REQUEST = Request("r", tuple(range(38, 48)), Sampling(seed=0, max_tokens=3, prompt_logprobs=2))


async def test_tokens_follow_the_kv() -> None:
    decode = PacedDecode("d0", 64)
    prefill = PacedPrefill("p0", decode.land, 64)
    decode.land("one that was given up")
    async with (
        closing(prefill.prefill(PrefillJob(REQUEST, "t", 0, "d0", handoff=True))) as prefilling,
        closing(decode.decode(DecodeJob(REQUEST, "t", 0))) as decoding,
    ):
        assert await anext(decoding) == Reserved()
        landed = asyncio.ensure_future(anext(decoding))
        first = await anext(prefilling)
        assert isinstance(first, Prefilled)
        assert len(first.prompt_logprobs) == len(REQUEST.prompt_ids) - 1
        assert not landed.done()
        assert isinstance(await anext(prefilling), HandedOff)
        assert isinstance(await landed, Landed)
        rest = [event async for event in decoding]
    assert [event.index for event in rest if isinstance(event, Token)] == [1, 2]
    assert isinstance(rest[-1], Decoded)


@pytest.mark.slow
async def test_each_node_is_a_process_of_its_own() -> None:
    times = Times()
    async with running(SHIPPED, 1) as cluster:
        assert len({node.pid for node in cluster.nodes.values()} | {cluster.router.pid}) == 3
        assert set(cluster.nodes) == set(Role)
        await stream(anew(cluster.url), 5, 0, times)
        assert set(cluster.processor_s()) == {"router", "prefill node", "decode node", "clients"}
    assert (times.failures, len(times.ages)) == ([], 5)
