"""The decode node as its router sees it, fed by a real prefill node over an in-process wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from torch import Tensor

from hackkv.codec import Batch, LayerPages
from hackkv.errors import (
    HackkvError,
    HandshakeRefused,
    NonFiniteError,
    Overloaded,
    RequestError,
    TransferError,
    by_code,
)
from hackkv.model.generate import generate
from hackkv.types import (
    DecodeEvent,
    DecodeJob,
    Finish,
    HandedOff,
    HandoffFailed,
    Landed,
    Prefilled,
    PrefillJob,
    Request,
    Reserved,
    Token,
)
from tests.pair import PI, GatedCodec, Pair, greedy, paired, poisoned, prompt, tiny_worker
from transport.closing import closing

LENGTHS = (1, PI - 1, PI, PI + 1, 2 * PI, 70)


async def landed(nodes: Pair, request: Request) -> AsyncIterator[DecodeEvent]:
    """A decode call whose KV has landed: its next event is a token."""
    events = nodes.decode.decode(DecodeJob(request, request.request_id, 0))
    assert await anext(events) == Reserved()
    async with closing(nodes.prefill.prefill(PrefillJob(request, request.request_id, 0, nodes.address))) as prefilling:
        assert isinstance(await anext(prefilling), Prefilled)
        assert isinstance(await anext(prefilling), HandedOff)
    assert isinstance(await anext(events), Landed)
    return events


async def close(events: AsyncIterator[DecodeEvent]) -> None:
    async with closing(events):
        pass


@pytest.mark.parametrize(
    ("codec", "settings"),
    [("fp16", {}), ("hack", {}), ("hack-k4v2", {}), ("hack-paper", {}), ("hack-paper", {"send_sums": True})],
    ids=str,
)
async def test_prefill_handoff_decode_equals_one_process(codec: str, settings: dict[str, bool]) -> None:
    """Greedy tokens in FP32, all at once: joining and leaving the batch changes nothing."""
    worker = tiny_worker(codec, **settings)
    requests = [greedy(f"r{n}", prompt(n, n), 3 + n % 4) for n in LENGTHS]
    async with paired(worker, max_batch=4) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests))
        await nodes.assert_idle()
        info = await nodes.decode.describe()
        assert dict(info.stats)["hackkv_received_tokens_total"] == sum(LENGTHS)
    assert [result.tokens for result in served] == [generate(worker, request) for request in requests]
    for result in served:
        assert result.decoded is not None
        assert result.decoded.decode_s >= result.decoded.attend_s >= result.decoded.approximation_s >= 0
        assert result.decoded.queue_s >= 0


async def test_sampled_tokens_are_those_of_one_process() -> None:
    """The draw for token i depends on the seed and i only; penalties see prompt and output across both nodes."""
    worker = tiny_worker("hack")
    request = greedy("r", prompt(3, 45), 12, logprobs=2)
    sampling = replace(request.sampling, seed=-7, temperature=0.9, top_p=0.95, frequency_penalty=0.5)
    request = replace(request, sampling=replace(sampling, repetition_penalty=1.2))
    async with paired(worker) as nodes:
        served = await nodes.serve(request)
    assert served.tokens == generate(worker, request)


async def test_requantization_runs_through_prefill_wire_and_decode() -> None:
    """Ablation HACK/RQE: no open page travels, and decode goes on in the codes of the last page."""
    worker = tiny_worker("hack", open_page="requantize")
    request = greedy("r", prompt(5, PI + 20), PI)
    async with paired(worker, chunk_pages=4) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.handed_off is not None
    assert not any(name.startswith("open") for name, _ in served.handed_off.receipt.bytes_by_plane)
    assert served.tokens == generate(worker, request)


async def test_eos_ends_a_sequence_within_the_batch() -> None:
    worker = tiny_worker("hack")
    request = greedy("r", prompt(6, 40), 9)
    tokens = generate(worker, request)
    stop = next(token for token in tokens[2:] if token.token_id not in [t.token_id for t in tokens[:2]])
    ending = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop.token_id,)))
    async with paired(worker) as nodes:
        served = await nodes.serve(ending)
        await nodes.assert_idle()
    assert served.tokens[-1] == replace(stop, finish=Finish.STOP)
    assert served.tokens[:-1] == tokens[: stop.index]


async def reserved(nodes: Pair, name: str, prompt_tokens: int, max_tokens: int) -> AsyncIterator[DecodeEvent]:
    """A decode call that has room."""
    events = nodes.decode.decode(DecodeJob(greedy(name, (5,) * prompt_tokens, max_tokens), name, 0))
    assert await anext(events) == Reserved()
    return events


async def test_no_room_is_said_before_anything_is_held() -> None:
    async with paired(tiny_worker("hack"), num_pages=4, max_sequences=2) as nodes:
        first = await reserved(nodes, "a", 4 * PI - 4, PI)
        named = "1 pages, 1 more to grow and a slot are needed; 1 pages and 1 slots are free"
        with pytest.raises(Overloaded, match=named):
            await reserved(nodes, "b", PI, PI)
        second = await reserved(nodes, "c", 1, 2)
        with pytest.raises(Overloaded, match="0 slots are free"):
            await reserved(nodes, "d", 1, 2)
        assert dict((await nodes.decode.describe()).stats)["hackkv_admission_refused_total"] == 2
        await close(first)
        await close(second)
        await nodes.assert_idle()


async def test_without_host_memory_all_that_a_request_may_come_to_is_kept() -> None:
    async with paired(tiny_worker("hack"), num_pages=4, swap_bytes=0) as nodes:
        first = await reserved(nodes, "a", 1, 3 * PI)
        with pytest.raises(Overloaded, match="64 tokens more may not fit into this node's device and host memory"):
            await reserved(nodes, "b", 1, 2 * PI)
        second = await reserved(nodes, "c", 1, 2 * PI - 1)
        await close(first)
        await close(second)
        await nodes.assert_idle()


@pytest.mark.parametrize(
    ("tokens", "named"), [(5 * PI + 1, "need 5 pages; this node has 4"), (1025, "exceed the model's 1024")]
)
async def test_requests_that_can_never_run_are_refused(tokens: int, named: str) -> None:
    async with paired(tiny_worker("hack"), num_pages=4) as nodes:
        events = nodes.decode.decode(DecodeJob(greedy("r", (5,) * (tokens - 2), 2), "r", 0))
        with pytest.raises(RequestError, match=named):
            await anext(events)
        await nodes.assert_idle()


@pytest.mark.parametrize(("prompt_tokens", "param"), [(1023, "max_tokens"), (1024, "prompt")])
async def test_what_exceeds_the_context_is_named(prompt_tokens: int, param: str) -> None:
    """A prompt that leaves room for a token is not at fault."""
    async with paired(tiny_worker("hack")) as nodes:
        events = nodes.decode.decode(DecodeJob(greedy("r", (5,) * prompt_tokens, 2), "r", 0))
        with pytest.raises(RequestError, match="exceed the model's 1024") as raised:
            await anext(events)
        assert raised.value.param == param


async def test_a_transfer_id_in_use_gives_its_pages_back() -> None:
    async with paired(tiny_worker("hack")) as nodes:
        job = DecodeJob(greedy("r", (5,), 2), "r", 0)
        first, second = nodes.decode.decode(job), nodes.decode.decode(job)
        assert await anext(first) == Reserved()
        held = (await nodes.decode.describe()).free_pages
        with pytest.raises(HandshakeRefused, match="r is in use"):
            await anext(second)
        assert (await nodes.decode.describe()).free_pages == held
        await close(first)
        await nodes.assert_idle()


@pytest.mark.parametrize("phase", ["reserved", "landed", "in a step", "waiting for the batch"])
async def test_cancelling_frees_everything(phase: str) -> None:
    """In each phase; pages that a step still writes to come back after it, and neighbours are unharmed."""
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    victim, other = greedy("victim", prompt(7, PI + 1), 20), greedy("other", prompt(8, 9), 6)
    async with paired(worker, replace(worker, codec=codec), max_batch=1, max_sequences=2, num_pages=4) as nodes:
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


async def drain(nodes: Pair, job: PrefillJob) -> None:
    """Prefill up to the fate of the first push; a failure is raised."""
    async with closing(nodes.prefill.prefill(job)) as events:
        async for event in events:
            if isinstance(event, HandoffFailed):
                raise by_code(event.code, event.message)
            if isinstance(event, HandedOff):
                return


async def test_cancelling_during_the_transfer_stops_the_sender() -> None:
    """Half of the frames have landed in pages that are given back; the sender is told why."""
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


async def test_nan_in_decode_fails_its_own_request_only() -> None:
    """A token that decode feeds back has NaN weights on this node: its request ends, its neighbours go on."""
    worker = tiny_worker("hack")
    requests = [greedy(f"r{n}", prompt(n, n), 10) for n in (5, PI, 50)]
    expected = [generate(worker, request) for request in requests]
    others = {token.token_id for tokens in (expected[0], expected[2]) for token in tokens}
    bad = next(token for token in expected[1][:-1] if token.token_id not in others)
    async with paired(worker, poisoned(worker, bad.token_id)) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests), return_exceptions=True)
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    assert f"K is nan at token {PI + bad.index}," in str(served[1])
    for result, tokens in ((served[0], expected[0]), (served[2], expected[2])):
        assert not isinstance(result, BaseException)
        assert result.tokens == tokens


async def test_a_prefill_node_that_drops_a_handoff_is_reported_to_the_decode_call() -> None:
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    request = greedy("r", prompt(11, 3 * PI), 4)
    async with paired(replace(worker, codec=codec), worker, chunk_pages=1) as nodes:
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        sending = asyncio.create_task(drain(nodes, PrefillJob(request, "r", 0, nodes.address)))
        codec.permits.release(1)
        for _ in range(2):
            await asyncio.to_thread(codec.reached)
        sending.cancel()
        with pytest.raises(TransferError, match="the prefill node: the sender of r went away"):
            await anext(events)
        codec.open()
        served = await nodes.serve(greedy("next", prompt(12, 5), 3))
        assert len(served.tokens) == 3
        await nodes.assert_idle()


async def test_different_settings_are_refused_by_name_on_both_sides() -> None:
    async with paired(tiny_worker("hack"), tiny_worker("hack-k4v2")) as nodes:
        request = greedy("r", prompt(13, 40), 4)
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        named = "fingerprints differ in codec: 'hack-k4v2' here, 'hack' at the peer"
        with pytest.raises(HandshakeRefused, match=named):
            await drain(nodes, PrefillJob(request, "r", 0, nodes.address))
        with pytest.raises(HandshakeRefused, match=named):
            await anext(events)
        await nodes.prefill.close()
        assert (await nodes.decode.describe()).free_pages == 64


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_of_cancellations_leaves_nothing_behind(seed: int) -> None:
    """Requests are dropped after a seeded number of loop turns each; those that live get their own tokens."""
    worker = tiny_worker("hack")
    turns = prompt(seed, 16)
    requests = [greedy(f"r{i}", prompt(100 + i % 4, 10 + 20 * (i % 4)), 6) for i in range(16)]
    expected = {len(request.prompt_ids): generate(worker, request) for request in requests[:4]}
    async with paired(worker, num_pages=12, max_sequences=4, max_batch=2, host_bytes=1 << 16) as nodes:
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


async def test_an_unexpected_error_fails_its_batch_and_not_the_node(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GatedCodec):
        def attend(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if batch.spans[0].start == 9:
                raise RuntimeError("boom")
            return super().attend(layer, pool, batch, q, k, v)

    codec = Broken()
    codec.open()
    worker = tiny_worker("fp16")
    async with paired(worker, replace(worker, codec=codec)) as nodes:
        with pytest.raises(HackkvError, match="decode failed: RuntimeError: boom"):
            await nodes.serve(greedy("r", prompt(14, 7), 6))
        served = await nodes.serve(greedy("next", prompt(15, 20), 3))
        assert [type(token) for token in served.tokens] == [Token] * 3
        await nodes.assert_idle()
    assert "a decode step failed" in caplog.text
