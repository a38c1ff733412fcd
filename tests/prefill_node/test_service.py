"""The prefill node as its router sees it, with a real decode node behind an in-process wire."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hackkv.batch import Span
from hackkv.errors import (
    HandshakeRefused,
    Overloaded,
    RequestError,
)
from hackkv.logprobs import PromptLogprobs
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.types import (
    Finish,
    Prefilled,
    PrefillJob,
)
from prefill_node.drain_rate import LONGEST_S
from tests.pair import PI, TIMEOUT_S, GatedCodec, greedy, paired, prompt, tiny_worker
from tests.prefill_node.calls import collect, prefill_only


@pytest.mark.parametrize("chunk_pages", [1, 2, 8])
async def test_first_tokens_equal_the_reference_for_any_chunk_size(chunk_pages: int) -> None:
    """Eight prompts at once share passes. Each gets the token that it would get alone."""
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


async def test_a_full_queue_turns_prompts_away_and_says_when_to_come_back() -> None:
    """The wait is the longest one while no prompt leaves. A prompt alone is never too long for the queue."""
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


@pytest.mark.parametrize("phase", ["queued", "in a pass", "between passes", "in the outbox"])
async def test_cancelling_frees_everything(phase: str) -> None:
    """This holds in each phase, and the next request is served as if nothing had happened."""
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
    """The short prompt gets its token after two passes: the one during which it came, and its own."""
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


@pytest.mark.parametrize(("chunk_pages", "scored_rows"), [(1, 5), (2, 512), (8, 5), (8, 512)])
async def test_prompt_logprobs_cross_chunk_boundaries(
    chunk_pages: int, scored_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities equal those of one whole forward pass, position by position."""
    monkeypatch.setattr("prefill_node.engine.SCORED_ROWS", scored_rows)
    worker = tiny_worker("fp16")
    ids = prompt(10, 4 * PI + 7)
    async with paired(worker, chunk_pages=chunk_pages) as nodes:
        event = await prefill_only(nodes.prefill, greedy("r", ids, 1, prompt_logprobs=2))
        single = await prefill_only(nodes.prefill, greedy("s", ids[:1], 1, prompt_logprobs=2))
    assert (len(single.prompt_logprobs), len(event.prompt_logprobs)) == (0, len(ids) - 1)
    runner = ModelRunner(worker.model, worker.codec, 5, 1)
    hidden = runner.forward([Span(0, 0, len(ids), tuple(range(5)))], ids)
    expected = PromptLogprobs()
    expected.extend(worker.model.kernels.score(worker.model.logits(hidden[:-1]), ids[1:], [2] * (len(ids) - 1)))
    assert event.prompt_logprobs.own.tolist() == pytest.approx(expected.own.tolist(), abs=1e-4)
    assert event.prompt_logprobs.top_ids == expected.top_ids


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
