"""A prompt waits for host memory for the worst case of its KV, beside the real size of earlier prompts' KV. So with a
wire form that shrinks pages, more KV fits into the same host memory."""

from __future__ import annotations

import asyncio

import pytest

from hackkv.codec import rows_held
from hackkv.codecs import CODECS
from hackkv.model.generate import generate
from hackkv.model.worker import Worker
from hackkv.types import DecodeJob, HandedOff, Prefilled, PrefillJob, Reserved, Token
from tests.pair import PI, TIMEOUT_S, greedy, paired, prompt, tiny_worker
from transport.closing import closing

PAGES = 6


def worst_bytes(worker: Worker) -> int:
    """The uncoded bytes of the rows that stay of a prompt of `PAGES` full pages."""
    return worker.footprint.wire_bytes(rows_held(worker.codec, PAGES * PI))


@pytest.mark.parametrize("codec", sorted(CODECS))
async def test_held_bytes_are_those_of_the_frames(codec: str) -> None:
    """This holds for every codec. The receipt counts the same bytes."""
    worker = tiny_worker(codec)
    request = greedy("r", prompt(1, PAGES * PI), 2)
    async with paired(worker) as nodes:
        async with (
            closing(nodes.prefill.prefill(PrefillJob(request, "r", 0))) as events,
            closing(nodes.decode.decode(DecodeJob(request, "r", 0))) as decoding,
        ):
            prefilled = await anext(events)
            assert isinstance(prefilled, Prefilled)
            assert prefilled.wire_encode_s > 0
            held = nodes.prefill.outbox.held_bytes
            assert await anext(decoding) == Reserved()
            await nodes.prefill.assign("r", 0, nodes.address)
            handed_off = await anext(events)
            assert isinstance(handed_off, HandedOff)
            tokens = [event async for event in decoding if isinstance(event, Token)]
        assert (held == worst_bytes(worker)) == (worker.codec.wire_form.name == "raw")
        assert held <= worst_bytes(worker)
        assert sum(size for _, size in handed_off.receipt.bytes_by_plane) == held
        assert [prefilled.token, *tokens] == generate(worker, request)
        await nodes.assert_idle()


@pytest.mark.parametrize("codec", [name for name in sorted(CODECS) if tiny_worker(name).codec.wire_form.name != "raw"])
async def test_what_coding_saved_lets_the_next_prompt_start(codec: str) -> None:
    """Host memory has room for one worst case and the first prompt's real frames, so the second prompt can start."""
    worker = tiny_worker(codec)
    first, second = greedy("first", prompt(1, PAGES * PI), 2), greedy("second", prompt(2, PAGES * PI), 2)
    async with paired(worker) as nodes, closing(nodes.prefill.prefill(PrefillJob(first, "first", 0))) as events:
        await anext(events)
        coded = nodes.prefill.outbox.held_bytes
    room = worst_bytes(worker) + coded
    assert room < 2 * worst_bytes(worker)
    async with paired(worker, host_bytes=room) as nodes:
        held = [nodes.prefill.prefill(PrefillJob(request, request.request_id, 0)) for request in (first, second)]
        async with asyncio.timeout(TIMEOUT_S):
            found = await asyncio.gather(*(anext(events) for events in held))
        assert [event.token for event in found if isinstance(event, Prefilled)] == [
            generate(worker, request)[0] for request in (first, second)
        ]
        for events in held:
            async with closing(events):
                pass
        await nodes.assert_idle()
