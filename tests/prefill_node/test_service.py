"""The prefill node as its router sees it, with a real decode node behind an in-process wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from torch import Tensor

from hackkv.codec import Batch, LayerPages, Span
from hackkv.codecs import CODECS
from hackkv.errors import (
    HackkvError,
    HandshakeRefused,
    NodeDraining,
    NonFiniteError,
    Overloaded,
    RequestError,
    TransferError,
)
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import prompt_logprobs
from hackkv.types import (
    DecodeJob,
    Finish,
    HandedOff,
    Handoff,
    HandoffEnd,
    HandoffFailed,
    KvFrame,
    Landed,
    NodeIdentity,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Receipt,
    Request,
    Reserved,
    Token,
)
from prefill_node.drain_rate import LONGEST_S
from prefill_node.service import PrefillService
from tests.pair import PI, TIMEOUT_S, GatedCodec, greedy, paired, poisoned, prompt, tiny_worker, unspeakable
from transport.closing import closing
from transport.wires import WIRES

Frames = AsyncIterator[KvFrame | HandoffEnd]


async def collect(
    events: AsyncIterator[PrefillEvent], on_event: Callable[[], None] | None = None
) -> list[PrefillEvent]:
    """Read a call up to the fate of its first push; `on_event` is called after each event."""
    found = []
    async with closing(events):
        async for event in events:
            found.append(event)
            if on_event:
                on_event()
            if isinstance(event, HandedOff | HandoffFailed):
                break
    return found


async def close(events: AsyncIterator[object]) -> None:
    """End a call whose generator the test holds."""
    async with closing(events):
        pass


async def prefill_only(service: PrefillService, request: Request) -> Prefilled:
    """Run a prompt whose KV nobody wants."""
    (event,) = await collect(service.prefill(PrefillJob(request, request.request_id, 0, handoff=False)))
    assert isinstance(event, Prefilled)
    return event


@pytest.mark.parametrize("chunk_pages", [1, 2, 8])
async def test_first_tokens_equal_the_reference_for_any_chunk_size(chunk_pages: int) -> None:
    """Eight prompts at once share passes; each gets what it would get alone."""
    worker = tiny_worker("hack")
    lengths = (1, PI - 1, PI, PI + 1, 2 * PI, 5 * PI + 3, 3, 77)
    requests = [greedy(f"r{n}", prompt(n, n), 1) for n in lengths]
    async with paired(worker, chunk_pages=chunk_pages, num_pages=20) as nodes:
        found = await asyncio.gather(*(prefill_only(nodes.prefill, request) for request in requests))
        await nodes.assert_idle()
    assert [event.token for event in found] == [generate(worker, request)[0] for request in requests]
    assert [event.computed_tokens for event in found] == list(lengths)
    assert all(event.prefill_s > 0 and event.queue_s >= 0 for event in found)
    assert all(0 <= event.quantize_s <= event.prefill_s for event in found)


async def test_frames_leave_before_the_prompt_is_complete() -> None:
    """Layer by layer: the wire has all pages of layer 0 while layer 1 has not begun."""
    codec = GatedCodec()
    worker = replace(tiny_worker("fp16"), codec=codec)
    arrived: asyncio.Queue[KvFrame | HandoffEnd] = asyncio.Queue()

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        async for item in frames:
            arrived.put_nowait(item)
        return Receipt(handoff.transfer_id, handoff.num_tokens, (), 0, 0, 0.0)

    wire = WIRES["inproc"](TIMEOUT_S)
    listener = wire.listener()
    address = await listener.serve(deliver)
    async with paired(worker, chunk_pages=2) as nodes:
        request = greedy("r", prompt(1, 3 * PI + 5), 8)
        service = PrefillService(
            NodeIdentity("p", "p", "1"),
            worker,
            wire.sender(),
            num_pages=8,
            max_prompts=8,
            chunk_tokens=2 * PI,
            host_bytes=1 << 30,
        )
        task = asyncio.create_task(collect(service.prefill(PrefillJob(request, "t", 0, address))))
        expected = [(0, 0, 2, 0), (1, 0, 2, 0), (0, 2, 1, 0), (0, 3, 1, 5), (1, 2, 1, 0), (1, 3, 1, 5)]
        for step in (1, 1, 2, 2):  # (chunk 0, layers 0 and 1), (chunk 1 with the open page, layers 0 and 1)
            codec.permits.release()
            for _ in range(step):
                item = await asyncio.wait_for(arrived.get(), TIMEOUT_S)
                assert isinstance(item, KvFrame)
                assert (item.layer, item.page_start, item.page_count, item.rows) == expected.pop(0)
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


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("when", ["after the handoff", "while the prompt runs"])
async def test_kv_goes_to_another_decode_node_and_gives_the_same_tokens(codec: str, when: str) -> None:
    """The first decode node takes some of it, or all, and is lost; the prompt is computed once."""
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
                assert await anext(decoding) == Reserved()
                await nodes.prefill.assign("t", 1, nodes.address)
                prefilled, again = await computing, await anext(events)
                assert isinstance(prefilled, Prefilled)
                assert isinstance(again, HandedOff), again
                assert (again.epoch, again.swap_wait_s) == (1, 0.0)
                tokens = [event async for event in decoding if isinstance(event, Token)]
        assert [prefilled.token, *tokens] == generate(worker, request)
        await nodes.assert_idle()


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "cancelled"])
async def test_a_full_host_pool_starts_no_prompt_until_it_drains(assigned: bool) -> None:
    """And then goes on by itself, whether the frames that waited were sent or dropped."""
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
            with pytest.raises(StopAsyncIteration):  # it makes room for the second
                await anext(held)
            await close(decoding)
        await close(held)
        prefilled, fate = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.token == generate(worker, second)[0]
        assert isinstance(fate, HandoffFailed)
        await nodes.assert_idle()


async def test_a_full_queue_turns_prompts_away_and_says_when_to_come_back() -> None:
    """The longest wait while nothing leaves; a prompt that is the only one is never too long for the queue."""
    codec = GatedCodec()
    async with paired(replace(tiny_worker("fp16"), codec=codec), chunk_pages=1, queue_tokens=3 * PI) as nodes:
        first = asyncio.create_task(prefill_only(nodes.prefill, greedy("long", prompt(1, 4 * PI), 1)))
        await asyncio.to_thread(codec.reached)
        with pytest.raises(Overloaded, match="128 prompt tokens wait already") as caught:
            await prefill_only(nodes.prefill, greedy("refused", (5,), 1))
        assert caught.value.retry_after_s == LONGEST_S
        codec.open()
        await first
        await prefill_only(nodes.prefill, greedy("welcome", (5,), 1))
        assert ("hackkv_prefill_refused_overloaded_total", 1.0) in (await nodes.prefill.describe()).stats


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


@pytest.mark.parametrize("phase", ["queued", "in a pass", "between passes", "in the outbox"])
async def test_cancelling_frees_everything(phase: str) -> None:
    """In each phase, and the next request is served as if nothing had been."""
    codec = GatedCodec()
    worker = replace(tiny_worker("fp16"), codec=codec)
    victim, other = greedy("victim", prompt(5, 3 * PI + 1), 4), greedy("other", prompt(6, 2 * PI), 4)
    async with paired(worker, chunk_pages=2, num_pages=4) as nodes:
        ahead = asyncio.create_task(prefill_only(nodes.prefill, other)) if phase == "queued" else None
        if ahead:
            await asyncio.to_thread(codec.reached)
        complete = asyncio.Event()
        task = asyncio.create_task(collect(nodes.prefill.prefill(PrefillJob(victim, "victim", 0)), complete.set))
        if phase == "queued":
            await asyncio.sleep(0)
            assert (await nodes.prefill.describe()).waiting == 1
        elif phase == "in a pass":
            await asyncio.to_thread(codec.reached)
        elif phase == "between passes":
            codec.permits.release(2)
            for _ in range(3):
                await asyncio.to_thread(codec.reached)
        else:
            codec.open()
            await complete.wait()
            assert nodes.prefill.outbox.held_bytes > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(HandshakeRefused):
            await nodes.prefill.assign("victim", 0, nodes.address)
        codec.open()
        if ahead:
            await ahead
        last = await prefill_only(nodes.prefill, greedy("last", other.prompt_ids, 4))
        assert last.token == generate(tiny_worker("fp16"), other)[0]
        await nodes.assert_idle()


@pytest.mark.parametrize("long_prompt", ["cancelled", "goes on"])
async def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(long_prompt: str) -> None:
    """Two passes of two layers each take it to its token: the one during which it came, and its own."""
    codec = GatedCodec()
    async with paired(replace(tiny_worker("fp16"), codec=codec)) as nodes:
        long = asyncio.create_task(prefill_only(nodes.prefill, greedy("long", prompt(1, 30 * PI), 1)))
        await asyncio.to_thread(codec.reached)
        short = asyncio.create_task(prefill_only(nodes.prefill, greedy("short", prompt(2, PI), 1)))
        await asyncio.sleep(0)
        if long_prompt == "cancelled":
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
        codec.permits.release(4)
        assert (await asyncio.wait_for(short, TIMEOUT_S)).token.index == 0
        codec.open()
        if long_prompt == "goes on":
            assert (await long).computed_tokens == 30 * PI
        await prefill_only(nodes.prefill, greedy("barrier", (5,), 1))
        await nodes.assert_idle()


async def test_nan_fails_its_own_request_only() -> None:
    """Three prompts in one pass, NaN weights for a token of the second: named, and its neighbours are unharmed.

    Their frames, sent before the pass was repeated, are not sent again: the decode node takes the handoffs.
    """
    worker = poisoned(tiny_worker("hack"), 511)
    good = [greedy(f"g{n}", prompt(n, n), 5) for n in (PI + 3, 2 * PI)]
    bad = greedy("bad", (*prompt(8, 20), 511, *prompt(9, 20)), 5)
    async with paired(worker, chunk_pages=8) as nodes:
        served = await asyncio.gather(
            nodes.serve(good[0]), nodes.serve(bad), nodes.serve(good[1]), return_exceptions=True
        )
        await prefill_only(nodes.prefill, greedy("barrier", (3,), 1))
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    assert str(served[1]) == "layer 0: K is nan at token 20, KV head 0"
    for request, result in zip(good, (served[0], served[2]), strict=True):
        assert not isinstance(result, BaseException)
        assert result.tokens == generate(worker, request)


async def test_logits_that_are_not_finite_fail_their_own_request_only() -> None:
    """Found at the very end of a pass, when all frames have left: the repeated pass must not send them twice, nor
    score the prompt twice."""
    worker = unspeakable(tiny_worker("hack", layers=1), 511)
    good = [greedy(f"g{n}", prompt(n, n), 5, prompt_logprobs=0) for n in (PI + 3, 2 * PI)]
    bad = greedy("bad", (*prompt(8, 20), 511), 5)
    async with paired(worker, chunk_pages=8) as nodes:
        served = await asyncio.gather(
            nodes.serve(good[0]), nodes.serve(bad), nodes.serve(good[1]), return_exceptions=True
        )
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    for request, result in zip(good, (served[0], served[2]), strict=True):
        assert not isinstance(result, BaseException), result
        assert result.tokens == generate(worker, request)
        assert [token.index for token in result.prefilled.prompt_logprobs] == list(range(1, len(request.prompt_ids)))


async def test_a_cut_prompt_between_complete_ones_is_not_blamed_for_their_logits() -> None:
    """A pass may hold [complete, cut, complete]; the third one's logits are bad."""
    worker = unspeakable(tiny_worker("hack", layers=1), 511)
    requests = [
        greedy("complete", prompt(1, PI // 2), 1),
        greedy("cut", prompt(2, 3 * PI), 1),
        greedy("bad", (*prompt(3, 4), 511), 1),
    ]
    async with paired(worker, chunk_pages=2) as nodes:
        found = await asyncio.gather(
            *(prefill_only(nodes.prefill, request) for request in requests), return_exceptions=True
        )
        await nodes.assert_idle()
    assert isinstance(found[2], NonFiniteError)
    for request, event in zip(requests[:2], found[:2], strict=True):
        assert isinstance(event, Prefilled), event
        assert event.token == generate(worker, request)[0]


@pytest.mark.parametrize("ending", [Finish.LENGTH, Finish.STOP])
async def test_a_request_that_ends_with_token_0_is_not_handed_off(ending: Finish) -> None:
    worker = tiny_worker("hack")
    request = greedy("r", prompt(7, 50), 1 if ending is Finish.LENGTH else 9)
    if ending is Finish.STOP:
        first = generate(worker, request)[0].token_id
        request = replace(request, sampling=replace(request.sampling, stop_token_ids=(first,)))
    async with paired(worker) as nodes:
        (event,) = await collect(nodes.prefill.prefill(PrefillJob(request, "r", 0, nodes.address)))
        assert isinstance(event, Prefilled)
        assert event.token.finish is ending
        assert [event.token] == generate(worker, request)
        await nodes.assert_idle()


@pytest.mark.parametrize("chunk_pages", [1, 2, 8])
async def test_prompt_logprobs_cross_chunk_boundaries(chunk_pages: int) -> None:
    """Position by position they are those of one whole forward pass."""
    worker = tiny_worker("fp16")
    ids = prompt(10, 4 * PI + 7)
    async with paired(worker, chunk_pages=chunk_pages) as nodes:
        event = await prefill_only(nodes.prefill, greedy("r", ids, 1, prompt_logprobs=2))
        single = await prefill_only(nodes.prefill, greedy("s", ids[:1], 1, prompt_logprobs=2))
    assert single.prompt_logprobs == ()
    assert [(token.index, token.token_id) for token in event.prompt_logprobs] == list(enumerate(ids))[1:]
    runner = ModelRunner(worker.model, worker.codec, 5, 1)
    hidden = runner.forward([Span(0, 0, len(ids), tuple(range(5)))], ids)
    expected = prompt_logprobs(worker.model.logits(hidden[:-1]), 1, ids[1:], 2)
    for found, wanted in zip(event.prompt_logprobs, expected, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [top.token_id for top in found.top] == [top.token_id for top in wanted.top]


@pytest.mark.parametrize(
    ("ids", "max_tokens", "named"),
    [
        ((), 1, "empty"),
        ((3, -1), 1, "token id outside"),
        ((512,), 1, "token id outside"),
        ((3,) * 1000, 25, "1025 tokens; the model allows 1024"),
        ((3,) * 5 * PI, 1, "page pool"),
    ],
)
async def test_impossible_prompts_are_refused_at_once(ids: tuple[int, ...], max_tokens: int, named: str) -> None:
    async with paired(tiny_worker("hack"), num_pages=4) as nodes:
        with pytest.raises(RequestError, match=named) as caught:
            await prefill_only(nodes.prefill, greedy("r", ids, max_tokens))
        assert caught.value.param == "prompt"
        await nodes.assert_idle()


async def test_a_handoff_that_fails_is_told_after_token_0_and_the_kv_stays() -> None:
    """The decode node does not know the transfer when its first frame comes; a later epoch finds all frames."""
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


async def test_an_unexpected_error_fails_its_pass_and_not_the_node(caplog: pytest.LogCaptureFixture) -> None:
    worker = tiny_worker("fp16")

    class Broken(GatedCodec):
        def attend(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if batch.spans[0].count == 7:
                raise RuntimeError("boom")
            return super().attend(layer, pool, batch, q, k, v)

    codec = Broken()
    codec.open()
    async with paired(replace(worker, codec=codec)) as nodes:
        with pytest.raises(HackkvError, match="prefill failed: RuntimeError: boom"):
            await collect(nodes.prefill.prefill(PrefillJob(greedy("r", prompt(14, 7), 4), "t", 0)))
        await prefill_only(nodes.prefill, greedy("next", (5,), 1))
        await nodes.assert_idle()
    assert "a prefill pass failed" in caplog.text
