"""KV leaves a prefill node while its prompt runs, from the outbox, and again if a decode node is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hackkv.codecs import CODECS
from hackkv.errors import (
    TransferError,
)
from hackkv.model.generate import generate
from hackkv.nodes import NodeIdentity
from hackkv.types import (
    DecodeJob,
    HandedOff,
    Handoff,
    HandoffEnd,
    HandoffFailed,
    KvFrame,
    Landed,
    Prefilled,
    PrefillJob,
    Receipt,
    Reserved,
    Token,
)
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from tests.pair import PI, TIMEOUT_S, GatedCodec, greedy, paired, prompt, tiny_worker
from tests.prefill_node.calls import close, collect, prefill_only
from transport.closing import closing
from transport.wires import Loopback

Frames = AsyncIterator[KvFrame | HandoffEnd]


LAYER_BY_LAYER = (
    [(0, 1, 0, 2, 0)],
    [(1, 1, 0, 2, 0)],
    [(0, 1, 2, 1, 0), (0, 1, 3, 1, 5)],
    [(1, 1, 2, 1, 0), (1, 1, 3, 1, 5)],
)
PASS_BY_PASS: tuple[list[tuple[int, ...]], ...] = ([], [(0, 2, 0, 2, 0)], [], [(0, 2, 2, 1, 0), (0, 2, 3, 1, 5)])
"""(layer, layers, first page, pages, exact rows) of the frames that leave at each layer of each of two passes."""


@pytest.mark.parametrize(("enough", "leaving"), [(1, LAYER_BY_LAYER), (1 << 20, PASS_BY_PASS)])
async def test_frames_leave_before_the_prompt_is_complete(
    enough: int, leaving: tuple[list[tuple[int, ...]], ...]
) -> None:
    """If the pages of a layer are enough for a frame, they leave before the next layer begins. If not, they leave
    together with those of the next layers, and no later than their pass ends."""
    codec = GatedCodec()
    worker = replace(tiny_worker("fp16"), codec=codec)
    arrived: asyncio.Queue[KvFrame | HandoffEnd] = asyncio.Queue()

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        async for item in frames:
            arrived.put_nowait(item)
        return Receipt(handoff.transfer_id, handoff.num_tokens, (), 0, 0, 0.0)

    wire = Loopback("inproc", TIMEOUT_S)
    listener = wire.listener()
    address = await listener.serve(deliver)
    async with paired(worker, chunk_pages=2) as nodes:
        request = greedy("r", prompt(1, 3 * PI + 5), 8)
        service = PrefillService(
            NodeIdentity("p", "p", "1"),
            worker,
            wire.sender(),
            8,
            PrefillSettings(max_prompts=8, chunk_tokens=2 * PI, frame_bytes=enough),
        )
        task = asyncio.create_task(collect(service.prefill(PrefillJob(request, "t", 0, address))))
        for frames in leaving:
            codec.permits.release()
            for frame in frames:
                item = await asyncio.wait_for(arrived.get(), TIMEOUT_S)
                assert isinstance(item, KvFrame)
                assert (item.layer, item.layer_count, item.page_start, item.page_count, item.rows) == frame
        prefilled, handed_off = await task
        assert isinstance(prefilled, Prefilled)
        assert isinstance(handed_off, HandedOff)
        end = await arrived.get()
        assert isinstance(end, HandoffEnd)
        assert end.first_token == prefilled.token.token_id
        assert handed_off.overlapped_bytes > 0
        await service.close()
        await listener.close()
        await nodes.assert_idle()


async def test_kv_waits_in_the_outbox_until_a_decode_node_is_named() -> None:
    worker = tiny_worker("hack")
    request = greedy("r", prompt(2, 70), 4)
    async with paired(worker) as nodes:
        events = nodes.prefill.prefill(PrefillJob(request, "t", 0))
        async with closing(events):
            assert isinstance(await anext(events), Prefilled)
            assert nodes.prefill.outbox.held_bytes > 0
            assert (await nodes.prefill.describe()).free_pages == 64, "the pages are free as soon as the prompt is done"
            decoding = nodes.decode.decode(DecodeJob(request, "t", 0))
            async with closing(decoding):
                assert await anext(decoding) == Reserved()
                await nodes.prefill.assign("t", 0, nodes.address)
                handed_off = await anext(events)
                assert isinstance(handed_off, HandedOff)
                assert (handed_off.overlapped_bytes, handed_off.epoch) == (0, 0)
                assert handed_off.swap_wait_s > 0
                assert handed_off.receipt.tokens == 70
        await nodes.assert_idle()


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("when", ["after the handoff", "while the prompt runs"])
async def test_kv_goes_to_another_decode_node_and_gives_the_same_tokens(codec: str, when: str) -> None:
    """The first decode node gets some or all of the KV and is lost. The prompt is computed once."""
    worker = tiny_worker(codec)
    request = greedy("r", prompt(2, 5 * PI + 3), 6)
    async with paired(worker, chunk_pages=1) as nodes:
        lost = nodes.decode.decode(DecodeJob(request, "t", 0))
        assert await anext(lost) == Reserved()
        async with closing(nodes.prefill.prefill(PrefillJob(request, "t", 0, nodes.address))) as events:
            computing = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            if when == "after the handoff":
                await computing
                handed_off = await anext(events)
                assert isinstance(handed_off, HandedOff)
                assert await anext(lost) == Landed(handed_off.receipt)
            await close(lost)
            async with closing(nodes.decode.decode(DecodeJob(request, "t", 1))) as decoding:
                reserved = await anext(decoding)
                stays = when == "after the handoff" and worker.codec.bytes_follow_tokens
                assert isinstance(reserved, Reserved)
                assert reserved.held.pages == (5 if stays else 0), "what has landed stays, if its bytes have a name"
                await nodes.prefill.assign("t", 1, nodes.address, reserved.held)
                prefilled, again = await computing, await anext(events)
                assert isinstance(prefilled, Prefilled)
                assert isinstance(again, HandedOff), again
                assert (again.epoch, again.swap_wait_s) == (1, 0.0)
                tokens = [event async for event in decoding if isinstance(event, Token)]
        assert [prefilled.token, *tokens] == generate(worker, request)
        await nodes.assert_idle()


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "cancelled"])
async def test_a_full_host_pool_starts_no_prompt_until_it_drains(assigned: bool) -> None:
    """Then it goes on by itself, whether the waiting frames were sent or dropped."""
    worker = tiny_worker("hack")
    first, second = greedy("first", prompt(3, 40), 4), greedy("second", prompt(4, 40), 4)
    async with paired(worker, host_bytes=1 << 14) as nodes:
        held = nodes.prefill.prefill(PrefillJob(first, "first", 0))
        assert isinstance(await anext(held), Prefilled)
        assert 2 * nodes.prefill.outbox.held_bytes > (1 << 14)
        waiting = asyncio.create_task(collect(nodes.prefill.prefill(PrefillJob(second, "second", 0, "nowhere"))))
        await prefill_only(nodes.prefill, greedy("no handoff", (5,), 1))
        assert (await nodes.prefill.describe()).waiting == 1
        if assigned:
            decoding = nodes.decode.decode(DecodeJob(first, "first", 0))
            assert await anext(decoding) == Reserved()
            await nodes.prefill.assign("first", 0, nodes.address)
            assert isinstance(await anext(held), HandedOff)
            with pytest.raises(StopAsyncIteration):  # its KV makes room for the second
                await anext(held)
            await close(decoding)
        await close(held)
        prefilled, fate = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.token == generate(worker, second)[0]
        assert isinstance(fate, HandoffFailed)
        await nodes.assert_idle()


async def test_a_handoff_that_fails_is_told_after_token_0_and_the_kv_stays() -> None:
    """The decode node does not know the transfer when its first frame comes. A later epoch finds all frames."""
    codec = GatedCodec()
    worker = replace(tiny_worker("fp16"), codec=codec)
    request = greedy("r", prompt(11, 8 * PI), 4)
    async with paired(worker, chunk_pages=1) as nodes:
        codec.open()
        async with closing(nodes.prefill.prefill(PrefillJob(request, "t", 0, nodes.address))) as events:
            prefilled, failed = await anext(events), await anext(events)
            assert isinstance(prefilled, Prefilled)
            assert isinstance(failed, HandoffFailed)
            assert (failed.epoch, failed.code) == (0, "handshake_refused")
            assert "'t' is not expected here" in failed.message
            async with closing(nodes.decode.decode(DecodeJob(request, "t", 1))) as decoding:
                assert await anext(decoding) == Reserved()
                await nodes.prefill.assign("t", 1, nodes.address)
                handed_off = await anext(events)
                assert isinstance(handed_off, HandedOff)
                assert await anext(decoding) == Landed(handed_off.receipt)
        await nodes.assert_idle()


async def test_a_transfer_id_in_use_is_refused_and_harms_nobody() -> None:
    async with paired(tiny_worker("hack")) as nodes:
        held = nodes.prefill.prefill(PrefillJob(greedy("r", prompt(13, 9), 4), "t", 0))
        assert isinstance(await anext(held), Prefilled)
        with pytest.raises(TransferError, match="t is under way already"):
            await collect(nodes.prefill.prefill(PrefillJob(greedy("r", prompt(13, 9), 4), "t", 1)))
        await nodes.prefill.assign("t", 0, "nowhere")
        failed = await anext(held)
        assert isinstance(failed, HandoffFailed)
        assert (failed.code, failed.message) == ("node_lost", "nowhere: nobody listens")
        await close(held)
        await nodes.assert_idle()
