"""A decode call that is dropped, in any phase, leaves nothing behind and harms nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decode_node.config import DecodeSettings
from hackkv.errors import (
    HackkvError,
    HandshakeRefused,
    Overloaded,
)
from hackkv.model.generate import generate
from hackkv.types import (
    DecodeJob,
    PrefillJob,
    Reserved,
)
from tests.decode_node.calls import close, drain, landed
from tests.pair import PI, GatedCodec, greedy, paired, prompt, tiny_worker


@pytest.mark.parametrize("phase", ["reserved", "landed", "in a step", "waiting for the batch"])
async def test_cancelling_frees_everything(phase: str) -> None:
    """This holds in each phase. Pages that a step still writes come back after it, and neighbours are unharmed."""
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    victim, other = greedy("victim", prompt(7, PI + 1), 20), greedy("other", prompt(8, 9), 6)
    few = DecodeSettings(max_batch=1, max_sequences=2)
    async with paired(worker, replace(worker, codec=codec), decoding=few, num_pages=4) as nodes:
        if phase == "reserved":
            events = nodes.decode.decode(DecodeJob(victim, "victim", 0))
            assert await anext(events) == Reserved()
            codec.open()
        elif phase == "landed":
            events = await landed(nodes, victim)
            codec.open()
        elif phase == "in a step":
            events = await landed(nodes, victim)
            token = asyncio.ensure_future(anext(events))
            await asyncio.to_thread(codec.reached)
            token.cancel()
            with pytest.raises(asyncio.CancelledError):
                await token
            assert (await nodes.decode.describe()).free_pages == 3, "the step still writes to the victim's pages"
            codec.open()
        else:
            busy = await landed(nodes, other)
            token = asyncio.ensure_future(anext(busy))
            await asyncio.to_thread(codec.reached)
            events = await landed(nodes, victim)
            waits = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            assert (await nodes.decode.describe()).waiting == 1
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            codec.open()
            first = await token
            rest = [event async for event in busy]
            assert [first, *rest][:-1] == generate(worker, other)[1:]
        await close(events)
        late = PrefillJob(victim, "victim", 0, nodes.address)
        with pytest.raises(HandshakeRefused, match="'victim' is not expected here"):
            await drain(nodes, late)
        served = await nodes.serve(greedy("last", other.prompt_ids, 6))
        assert served.tokens == generate(worker, other)
        await nodes.assert_idle()


async def test_cancelling_during_the_transfer_stops_the_sender() -> None:
    """Half of the frames have landed in pages that are given back. The sender gets the reason."""
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    request = greedy("r", prompt(9, 3 * PI), 4)
    async with paired(replace(worker, codec=codec), worker, chunk_pages=1) as nodes:
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        sending = asyncio.create_task(drain(nodes, PrefillJob(request, "r", 0, nodes.address)))
        codec.permits.release(2)
        for _ in range(3):
            await asyncio.to_thread(codec.reached)
        await close(events)
        codec.open()
        with pytest.raises(HackkvError, match="transfer r was cancelled at the decode node"):
            await sending
        served = await nodes.serve(greedy("next", prompt(10, 5), 3))
        assert served.tokens == generate(worker, greedy("next", prompt(10, 5), 3))
        await nodes.assert_idle()


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_of_cancellations_leaves_nothing_behind(seed: int) -> None:
    """Each request is dropped after a seeded number of loop turns. Requests that live get their own tokens."""
    worker = tiny_worker("hack")
    turns = prompt(seed, 16)
    requests = [greedy(f"r{i}", prompt(100 + i % 4, 10 + 20 * (i % 4)), 6) for i in range(16)]
    expected = {len(request.prompt_ids): generate(worker, request) for request in requests[:4]}
    few = DecodeSettings(max_sequences=4, max_batch=2)
    async with paired(worker, num_pages=12, decoding=few, host_bytes=1 << 16) as nodes:
        tasks = [asyncio.create_task(nodes.serve(request)) for request in requests]
        for turn in range(500):
            for task, last in zip(tasks[::2], turns[::2], strict=True):
                if last == turn:
                    task.cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        final = await nodes.serve(requests[3])
        assert final.tokens == expected[70]
        await nodes.assert_idle()
    for request, outcome in zip(requests, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, (Overloaded, asyncio.CancelledError)), outcome
        else:
            assert outcome.tokens == expected[len(request.prompt_ids)]
