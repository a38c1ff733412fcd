"""Sequences that outgrow the node's pages are swapped and brought back, and their tokens do not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode_node import copies
from decode_node.kept_pages import Copy
from hackkv.codecs import CODECS
from hackkv.model.generate import generate
from hackkv.types import Request
from tests.decode_node.calls import begun_together, ends_together, held_up
from tests.pair import PI, Pair, greedy, paired, prompt, tiny_worker


def growing(count: int) -> list[Request]:
    """Requests that land with one page each and grow to three. Every second one samples, with penalties."""
    requests = [greedy(f"r{i}", prompt(i, PI + 8 + i), 2 * PI - 10) for i in range(count)]
    for i in range(0, count, 2):
        sampling = replace(requests[i].sampling, temperature=0.9, seed=i, frequency_penalty=0.3, repetition_penalty=1.1)
        requests[i] = replace(requests[i], sampling=sampling)
    return requests


async def counts(nodes: Pair) -> dict[str, float]:
    """The decode node's statistics."""
    return dict((await nodes.decode.describe()).stats)


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
async def test_a_node_under_pressure_says_the_same(codec: str) -> None:
    """Four sequences that need nine pages share five. Nothing is computed twice, and everything comes back."""
    worker = tiny_worker(codec)
    requests = growing(4)
    prompts = sum(len(request.prompt_ids) for request in requests)
    decode, begin = held_up(worker)
    async with paired(worker, decode, num_pages=5) as nodes:
        served = await begun_together(nodes, begin, requests)
        stats = await counts(nodes)
        await nodes.assert_idle()
    assert [result.tokens for result in served] == [generate(worker, request) for request in requests]
    swaps = sum(result.swaps for result in served)
    assert swaps == stats["hackkv_swap_out_total"] == stats["hackkv_swap_in_total"] > 0
    assert (stats["hackkv_host_pool_bytes"], stats["hackkv_swapped_sequences"]) == (0, 0)
    assert stats["hackkv_received_tokens_total"] == prompts
    assert stats["hackkv_replayed_tokens_total"] == 0
    for result in served:
        assert result.decoded is not None
        assert (result.decoded.swapped_s > 0) == (result.swaps > 0)
        assert result.decoded.decode_s >= result.decoded.attend_s
    total = sum(result.decoded.swapped_s for result in served if result.decoded)
    assert stats["hackkv_swapped_seconds_total"] == pytest.approx(total)


@pytest.mark.parametrize("seed", range(3))
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(seed: int) -> None:
    """Clients leave while swapped, during a copy or in a step. Others get their tokens and every page comes back."""
    worker = tiny_worker("hack")
    requests = growing(8)
    turns = prompt(seed, 4)
    async with paired(worker, num_pages=9) as nodes:
        tasks = [asyncio.create_task(nodes.serve(request)) for request in requests]
        for leaver, turn in enumerate(turns):
            for _ in range(turn):
                await asyncio.sleep(0)
            tasks[2 * leaver].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await nodes.assert_idle()
        stats = await counts(nodes)
    assert (stats["hackkv_host_pool_bytes"], stats["hackkv_swapped_sequences"]) == (0, 0)
    for request, outcome in zip(requests, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            assert outcome.tokens == generate(worker, request)
        else:
            assert isinstance(outcome, asyncio.CancelledError), outcome
    assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) >= 4


async def test_a_swap_that_fails_ends_its_request_and_not_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One copy fails for lack of memory."""
    worker = tiny_worker("fp16")
    requests = growing(6)
    failures = iter([MemoryError("no memory")])
    decode, begin = held_up(worker)

    async with paired(worker, decode, num_pages=8) as nodes:
        swapper = nodes.decode._steps.copies._swapper
        out = swapper.out

        async def fails_once(*arguments: object) -> object:
            if error := next(failures, None):
                raise error
            return await out(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(swapper, "out", fails_once)
        outcomes = await ends_together(nodes, begin, requests)
        await nodes.assert_idle()
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [str(error) for error in failed] == ["swap failed: MemoryError: no memory"]
    assert "a swap failed" in caplog.text
    for request, outcome in zip(requests, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            assert outcome.tokens == generate(worker, request)


async def test_a_node_that_closes_begins_no_further_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It closes while one of several idle pages is copied to host memory."""
    monkeypatch.setattr(copies, "EMPTY_SHARE", 1.0)
    monkeypatch.setattr(copies, "SAVED_AT_ONCE", 1)
    async with paired(tiny_worker("fp16")) as nodes:
        copier, begun, go = nodes.decode._steps.copies, asyncio.Event(), asyncio.Event()
        swapper, saved = copier._swapper, list[Sequence[Copy]]()
        save = swapper.save

        async def held(pages: Sequence[Copy]) -> None:
            saved.append(pages)
            begun.set()
            await go.wait()
            await save(pages)

        monkeypatch.setattr(swapper, "save", held)
        await nodes.serve(greedy("r", prompt(1, 3 * PI + 5), 8))
        await begun.wait()
        closing = asyncio.create_task(copier.close())
        asyncio.get_running_loop().call_soon(go.set)  # after the task's first step
        await closing
    assert [len(pages) for pages in saved] == [1]
    assert "could not be copied" not in caplog.text
