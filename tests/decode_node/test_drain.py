"""A node that is asked to stop takes nothing new, finishes what it can, and lets go of the rest by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from chaos.loop import run as on_a_virtual_clock
from decode_node.config import DecodeSettings
from hackkv.errors import DeadlineExceeded, NodeDraining
from hackkv.model.generate import generate
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    HandedOff,
    Landed,
    Prefilled,
    PrefillJob,
    Reserved,
)
from tests.pair import PI, TIMEOUT_S, GatedCodec, greedy, paired, prompt, tiny_worker
from transport.closing import closing


async def rest(events: AsyncIterator[DecodeEvent]) -> list[DecodeEvent]:
    """All events that still come."""
    async with closing(events):
        return [event async for event in events]


async def test_what_runs_is_finished_and_nothing_new_is_taken() -> None:
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    request = greedy("r", prompt(1, 20), 12)
    async with paired(worker, replace(worker, codec=codec)) as nodes:
        serving = asyncio.create_task(nodes.serve(request))
        await asyncio.to_thread(codec.reached)
        draining = asyncio.create_task(nodes.decode.drain(TIMEOUT_S))
        await nodes.decode.draining.wait()
        assert (await nodes.decode.describe()).draining
        with pytest.raises(NodeDraining, match="d is about to stop"):
            await anext(nodes.decode.decode(DecodeJob(greedy("late", (5,), 2), "late", 0)))
        assert not draining.done()
        codec.open()
        assert (await serving).tokens == generate(worker, request)
        await draining
        assert dict((await nodes.decode.describe()).stats)["hackkv_drained_total"] == 0
        await nodes.assert_idle()


async def test_what_takes_too_long_goes_on_elsewhere() -> None:
    """One request waits for its KV, one is in a step: both hear of it, and the pages of both come back."""
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    async with paired(worker, replace(worker, codec=codec)) as nodes:
        waiting = nodes.decode.decode(DecodeJob(greedy("w", prompt(2, PI), 9), "w", 0))
        assert await anext(waiting) == Reserved()
        serving = asyncio.create_task(nodes.serve(greedy("r", prompt(1, 2 * PI), 12)))
        await asyncio.to_thread(codec.reached)
        draining = asyncio.create_task(nodes.decode.drain(0.0))
        for ending in (serving, rest(waiting)):
            with pytest.raises(NodeDraining, match="d is about to stop"):
                await ending
        codec.open()
        await draining
        assert dict((await nodes.decode.describe()).stats)["hackkv_drained_total"] == 2
        await nodes.assert_idle()


def test_a_reservation_whose_kv_never_comes_ends_at_its_deadline() -> None:
    """Its pages come back although nobody reads the stream. On a clock that jumps: the deadline is not over at once."""

    async def wait_for_kv() -> None:
        async with paired(tiny_worker("hack"), num_pages=4, decoding=DecodeSettings(landing_s=5.0)) as nodes:
            events = nodes.decode.decode(DecodeJob(greedy("r", prompt(1, 3 * PI), 9), "r", 0))
            assert await anext(events) == Reserved()
            assert (await nodes.decode.describe()).free_pages == 1
            with pytest.raises(DeadlineExceeded, match=r"no KV landed within 5 s"):
                await anext(events)
            assert dict((await nodes.decode.describe()).stats)["hackkv_landing_timeouts_total"] == 1
            await nodes.assert_idle()

    on_a_virtual_clock(wait_for_kv())


async def test_a_reader_that_stands_still_holds_no_pages() -> None:
    """All tokens are computed and kept for it; the pages are free for others."""
    worker = tiny_worker("hack")
    request = greedy("r", prompt(1, 2 * PI), 6)
    async with paired(worker) as nodes:
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        async with closing(nodes.prefill.prefill(PrefillJob(request, "r", 0, nodes.address))) as prefilling:
            assert isinstance(await anext(prefilling), Prefilled)
            assert isinstance(await anext(prefilling), HandedOff)
        await nodes.serve(greedy("next", prompt(2, 8), 30))
        info = await nodes.decode.describe()
        assert (info.free_pages, info.running, info.waiting) == (info.total_pages, 0, 0)
        landed, *tokens, decoded = [event async for event in events]
        assert (type(landed), type(decoded)) == (Landed, Decoded)
        assert tokens == generate(worker, request)[1:]
        await nodes.assert_idle()


async def test_a_reader_cancelled_while_its_call_ends_does_not_hold_up_a_drain() -> None:
    """A router has read `Decoded` and cancels the call, which is in its last await."""
    request = greedy("r", prompt(1, 20), 3)
    async with paired(tiny_worker("hack")) as nodes:
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        async with closing(nodes.prefill.prefill(PrefillJob(request, "r", 0, nodes.address))) as prefilling:
            assert isinstance(await anext(prefilling), Prefilled)
            assert isinstance(await anext(prefilling), HandedOff)
        reader = asyncio.create_task(_cancelled_after_decoded(events))
        await asyncio.wait([reader])
        assert reader.cancelled()
        async with asyncio.timeout(TIMEOUT_S):
            await nodes.decode.drain(2 * TIMEOUT_S)
        await nodes.assert_idle()


async def _cancelled_after_decoded(events: AsyncIterator[DecodeEvent]) -> None:
    reader = asyncio.current_task()
    assert reader is not None
    async for event in events:
        if isinstance(event, Decoded):
            asyncio.get_running_loop().call_soon(reader.cancel)
