"""A prefill node that drains finishes its prompts or leaves them to another node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hackkv.errors import (
    NodeDraining,
)
from hackkv.types import (
    DecodeJob,
    HandedOff,
    Prefilled,
    PrefillJob,
    Reserved,
)
from tests.pair import PI, TIMEOUT_S, GatedCodec, greedy, paired, prompt, tiny_worker
from tests.prefill_node.calls import close, prefill_only


async def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new() -> None:
    """A prompt that runs is computed and handed off, kept KV is given up, and then the node is idle."""
    codec = GatedCodec()
    request = greedy("r", prompt(1, 2 * PI), 4)
    async with paired(replace(tiny_worker("fp16"), codec=codec), chunk_pages=1) as nodes:
        codec.permits.release(2)
        kept = nodes.prefill.prefill(PrefillJob(greedy("kept", (5,), 2), "kept", 0, nodes.address))
        decoding = nodes.decode.decode(DecodeJob(greedy("kept", (5,), 2), "kept", 0))
        assert await anext(decoding) == Reserved()
        assert [type(await anext(kept)) for _ in range(2)] == [Prefilled, HandedOff]
        await close(decoding)
        running = nodes.prefill.prefill(PrefillJob(request, "r", 0))
        computing = asyncio.ensure_future(anext(running))
        while not await asyncio.to_thread(codec.arrived.acquire, timeout=0.01):
            pass
        draining = asyncio.create_task(nodes.prefill.drain(TIMEOUT_S))
        with pytest.raises(StopAsyncIteration):
            await anext(kept)
        with pytest.raises(NodeDraining):
            await prefill_only(nodes.prefill, greedy("late", (5,), 1))
        assert (await nodes.prefill.describe()).draining
        codec.open()
        assert isinstance(await computing, Prefilled)
        assert not draining.done()
        decoding = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(decoding) == Reserved()
        await nodes.prefill.assign("r", 0, nodes.address)
        assert [type(event) async for event in running] == [HandedOff]
        await asyncio.wait_for(draining, TIMEOUT_S)
        await close(decoding)
        await nodes.assert_idle()


@pytest.mark.parametrize("phase", ["in a pass", "in the outbox"])
async def test_what_a_draining_node_cannot_finish_in_time_is_for_another_node(phase: str) -> None:
    codec = GatedCodec()
    async with paired(replace(tiny_worker("fp16"), codec=codec)) as nodes:
        events = nodes.prefill.prefill(PrefillJob(greedy("r", prompt(1, PI), 4), "r", 0))
        computing = asyncio.ensure_future(anext(events))
        if phase == "in the outbox":
            codec.open()
            await computing
            computing = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(codec.reached)
        await nodes.prefill.drain(0.01)
        with pytest.raises(NodeDraining):
            await computing
        codec.open()
        assert nodes.prefill.outbox.held_bytes == 0
