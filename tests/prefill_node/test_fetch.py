"""A prefill node that lacks pages of a prompt fetches them from the decode node. Tokens do not change.

Every test compares with the tokens of one process that serves the prompt alone, from the beginning.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hackkv.model.generate import generate
from hackkv.types import DecodeJob, Prefilled, PrefillJob, Reserved, Token
from tests.pair import PI, SHARING, TIMEOUT_S, exchanged, greedy, paired, prompt, tiny_worker
from tests.polling import POLL_S
from tests.prefill_node.calls import close
from tests.prefill_node.fetching import ANSWER, FETCHES, FEW, cold, longer, rows_are_kept, second_turn, stat, turn
from transport.closing import closing


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_a_fresh_prefill_node_goes_on_with_what_the_decode_node_kept(codec: str) -> None:
    """Each turn has another prefill node, which fetches the kept pages and computes the rest."""
    worker = tiny_worker(codec)
    ids = prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        served = await turn(nodes, ids, "t0")
        for number in range(1, 3):
            held = (len(ids) + ANSWER - 1) // PI * PI
            ids = longer(ids, served, number)
            await rows_are_kept(nodes, worker, number)
            async with exchanged(nodes, worker, **FETCHES) as others:
                served = await turn(others, ids, f"t{number}")
                assert served.tokens == cold(worker, ids)
                told = served.prefilled
                assert (told.fetched_tokens, told.computed_tokens) == (held, len(ids) - held)
                assert 0 < told.fetch_s <= told.queue_s
                assert told.fetched_bytes <= worker.footprint.wire_bytes(held)
                assert await stat(others, "hackkv_fetched_bytes_total") == told.fetched_bytes
                await others.assert_idle()
        assert await stat(nodes, "hackkv_lends_refused_total") == 0


@pytest.mark.parametrize("codec", FEW)
async def test_the_node_that_has_the_prompt_fetches_the_answer(codec: str) -> None:
    """Fetched pages are known like any others, so a second prompt finds them."""
    worker = tiny_worker(codec)
    ids = prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes, exchanged(nodes, worker, **FETCHES) as others:
        first = await turn(others, ids, "first")
        await rows_are_kept(nodes, worker, 1)
        ids = longer(ids, first, 2)
        second = await turn(others, ids, "second")
        assert second.tokens == cold(worker, ids)
        assert second.prefilled.fetched_tokens == PI
        again = await turn(others, (*ids, 3), "again")
        assert again.tokens == cold(worker, (*ids, 3))
        assert again.prefilled.computed_tokens <= PI
        await others.assert_idle()


@pytest.mark.parametrize("codec", FEW)
async def test_pages_in_the_decode_nodes_host_memory_are_fetched_too(codec: str) -> None:
    worker = tiny_worker(codec)
    ids = prompt(1, 4 * PI + 5)
    async with paired(worker, num_pages=8) as nodes:
        first = await turn(nodes, ids, "first")
        await rows_are_kept(nodes, worker, 1)
        async with asyncio.timeout(TIMEOUT_S):
            while await stat(nodes, "hackkv_held_host_pages") < 5:  # noqa: ASYNC110  # nothing tells of a copy's end
                await asyncio.sleep(POLL_S)
        for number in range(4):
            await turn(nodes, prompt(20 + number, 4 * PI + 1), f"other{number}")
        ids = longer(ids, first, 2)
        async with exchanged(nodes, worker, **FETCHES) as others:
            second = await turn(others, ids, "second")
            assert second.tokens == cold(worker, ids)
            assert second.prefilled.fetched_tokens == 5 * PI
            await others.assert_idle()


async def test_where_pages_depend_on_more_than_tokens_nothing_is_fetched() -> None:
    async with second_turn(tiny_worker(open_page="requantize"), **FETCHES) as (nodes, ids):
        assert (await turn(nodes, ids, "second")).prefilled.computed_tokens == len(ids)


async def test_a_salt_separates_tenants() -> None:
    worker, ids = tiny_worker(), prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        await nodes.serve(replace(greedy("a", ids, 5), cache_salt="a"))
        for salt, fetched in (("b", 0), ("", 0), ("a", 3 * PI)):
            async with exchanged(nodes, worker, **FETCHES) as others:
                served = await others.serve(replace(greedy(f"other{salt}", ids, 5), cache_salt=salt))
                assert served.prefilled.fetched_tokens == fetched
                assert served.tokens == generate(worker, greedy("cold", ids, 5))


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"prefix_fetch": "never"}, None),
        ({"assumed_bytes_per_s": 1.0}, False),
        ({"assumed_bytes_per_s": 1e12, "assumed_tokens_per_s": 1e-3}, True),
        ({"prefix_cache": False, **FETCHES}, None),
    ],
)
async def test_the_settings_decide_before_anything_is_measured(settings: dict[str, Any], chosen: bool | None) -> None:
    worker = tiny_worker()
    async with second_turn(worker, **settings) as (nodes, ids):
        second = await turn(nodes, ids, "second")
        assert second.tokens == cold(worker, ids)
        assert (second.prefilled.fetched_tokens > 0) == bool(chosen)
        assert await stat(nodes, "hackkv_fetch_chosen_total") == (chosen is True)
        assert await stat(nodes, "hackkv_fetch_declined_total") == (chosen is False)


async def test_a_prompt_whose_every_token_is_scored_is_computed() -> None:
    async with second_turn(tiny_worker(), **FETCHES) as (nodes, ids):
        served = await turn(nodes, ids, "second", prompt_logprobs=1)
        assert (served.prefilled.fetched_tokens, served.prefilled.computed_tokens) == (0, len(ids))


@pytest.mark.parametrize("codec", FEW)
async def test_a_prompt_that_is_held_to_its_last_token_computes_its_last_page(codec: str) -> None:
    """At least one token is computed. With exact pages no rows before that page are kept, so all are computed."""
    worker, ids = tiny_worker(codec), prompt(1, 3 * PI)
    async with paired(worker) as nodes:
        await turn(nodes, ids, "first", tokens=2)
        await rows_are_kept(nodes, worker, 1)
        async with exchanged(nodes, worker, **FETCHES) as others:
            served = await turn(others, ids, "second")
            assert served.tokens == cold(worker, ids)
            assert served.prefilled.fetched_tokens == (2 * PI if worker.codec.window.pages == 1 else 0)
            assert await stat(others, "hackkv_lends_refused_total") == (worker.codec.window.pages > 1)


async def test_what_a_client_left_unfinished_can_be_fetched() -> None:
    """The router finds a stop string and closes the call in the middle of a step."""
    worker, ids = tiny_worker("rot-k3v2"), prompt(1, PI + 3)
    said = tuple(token.token_id for token in cold(worker, ids, 4 * PI))
    async with paired(worker) as nodes:
        decoding = nodes.decode.decode(DecodeJob(greedy("r", ids, 4 * PI, ignore_eos=True), "r", 0))
        assert isinstance(await anext(decoding), Reserved)
        async with closing(
            nodes.prefill.prefill(PrefillJob(greedy("r", ids, 4 * PI), "r", 0, nodes.address))
        ) as events:
            assert isinstance(await anext(events), Prefilled)
            async for event in decoding:
                if isinstance(event, Token) and event.index == 3 * PI:
                    break
        await close(decoding)
        await rows_are_kept(nodes, worker, 1)
        following = (*ids, *said)
        async with exchanged(nodes, worker, **FETCHES) as others:
            served = await turn(others, following, "next")
            assert served.tokens == cold(worker, following)
            # The sequence may have run a page further than its reader has read.
            assert served.prefilled.fetched_tokens >= 4 * PI
            await others.assert_idle()


async def test_many_prompts_fetch_at_once_into_few_pages() -> None:
    """Waiting prompts hold no pages, so a pool with room for two at a time serves them all."""
    worker, begun = tiny_worker(), [prompt(number, 3 * PI + number) for number in range(8)]
    async with paired(worker, num_pages=128) as nodes:
        firsts = await asyncio.gather(*(turn(nodes, ids, f"a{n}") for n, ids in enumerate(begun)))
        turns = [longer(ids, first, 9) for ids, first in zip(begun, firsts, strict=True)]
        async with exchanged(nodes, worker, num_pages=12, **FETCHES) as others:
            seconds = await asyncio.gather(*(turn(others, ids, f"b{n}") for n, ids in enumerate(turns)))
            assert [one.tokens for one in seconds] == [cold(worker, ids) for ids in turns]
            assert await stat(others, "hackkv_fetch_chosen_total") == len(turns)
            await others.assert_idle()


async def test_without_host_memory_nothing_is_fetched() -> None:
    """A fetch claims its bytes before the first comes. Here there is only room for the KV that the prompt sends."""
    worker = tiny_worker("fp16")
    async with second_turn(worker, host_bytes=2 * worker.footprint.page_bytes, **FETCHES) as (nodes, ids):
        served = await turn(nodes, ids, "second")
        assert (served.tokens, served.prefilled.fetched_tokens) == (cold(worker, ids), 0)
        assert await stat(nodes, "hackkv_fetch_failed_overloaded_total") == 1
