"""Fetches that go wrong, come late or are not wanted any more: the prompt is computed, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from faults.injector import Injector
from faults.plan import Action, FaultPlan, FaultRule, Point
from faults.process import ProcessHands
from faults.seams import lending
from hackkv.errors import NodeDraining
from hackkv.types import DecodeJob, Handoff, HandoffEnd, KvFrame, Prefilled, PrefillJob, Reserved
from tests.pair import PI, exchanged, greedy, paired, prompt, tiny_worker
from tests.prefill_node.calls import close
from tests.prefill_node.fetching import FETCHES, FEW, Between, cold, longer, rows_are_kept, stat, turn
from transport.closing import closing

STRIKES = {
    "cut": (FaultRule(at=Point.LENT, do=Action.CUT, nth=2), "node_lost"),
    "corrupt": (FaultRule(at=Point.LENT, do=Action.CORRUPT, nth=2), "frame_refused"),
    "drop": (FaultRule(at=Point.LENT, do=Action.DROP, nth=1), "frame_refused"),
    "drop the last": (FaultRule(at=Point.LENT, do=Action.DROP, nth=2), "frame_refused"),
    "duplicate": (FaultRule(at=Point.LENT, do=Action.DUPLICATE, nth=1), "frame_refused"),
}


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("codec", FEW)
async def test_whatever_goes_wrong_the_prompt_is_computed(codec: str, strike: str) -> None:
    worker, ids = tiny_worker(codec), prompt(1, 3 * PI + 5)
    rule, code = STRIKES[strike]
    async with paired(worker) as nodes:
        first = await turn(nodes, ids, "first")
        await rows_are_kept(nodes, worker, 1)
        way = Between(nodes)
        way.lend = lending(nodes.decode.inbox.lend, Injector(FaultPlan(rules=(rule,)), "d", ProcessHands(None)))
        ids = longer(ids, first, 2)
        async with exchanged(replace(nodes, sender=way), worker, **FETCHES) as others:
            second = await turn(others, ids, "second")
            assert second.tokens == cold(worker, ids)
            assert (second.prefilled.fetched_tokens, second.prefilled.computed_tokens) == (0, len(ids))
            assert await stat(others, f"hackkv_fetch_failed_{code}_total") == 1
            await others.assert_idle()


async def test_a_lender_that_stalls_is_given_up() -> None:
    """The node waits as long as its settings say, and no longer than both ways should take together."""
    worker, ids = tiny_worker(), prompt(1, 3 * PI + 5)
    rule = FaultRule(at=Point.LENT, do=Action.STALL)
    settings: dict[str, Any]
    for settings in ({"prefix_fetch": "always", "fetch_s": 0.01}, {"assumed_tokens_per_s": 2000.0}):
        async with paired(worker) as nodes:
            first = await turn(nodes, ids, "first")
            way = Between(nodes)
            way.lend = lending(nodes.decode.inbox.lend, Injector(FaultPlan(rules=(rule,)), "d", ProcessHands(None)))
            following = longer(ids, first, 2)
            async with exchanged(replace(nodes, sender=way), worker, **settings) as others:
                second = await turn(others, following, "second")
                assert second.tokens == cold(worker, following)
                assert await stat(others, "hackkv_fetch_failed_slow_total") == 1
                await others.assert_idle()


@pytest.mark.parametrize("ending", ["the client leaves", "the node drains", "the decode call ends"])
async def test_a_request_that_ends_in_the_middle_of_its_fetch_leaves_nothing(ending: str) -> None:
    worker, ids = tiny_worker(), prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        first = await turn(nodes, ids, "first")
        way, ids = Between(nodes), longer(ids, first, 2)
        begun, lend = asyncio.Event(), way.lend
        go = asyncio.Event()

        async def halting(handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
            async with closing(lend(handoff)) as items:
                async for item in items:
                    begun.set()
                    yield item
                    await go.wait()

        way.lend = halting
        request = greedy("r", ids, 5)
        async with exchanged(replace(nodes, sender=way), worker, **FETCHES) as others:
            decoding = others.decode.decode(DecodeJob(request, "r", 0))
            reserved = await anext(decoding)
            assert isinstance(reserved, Reserved)
            job = PrefillJob(request, "r", 0, others.address, held_pages=reserved.held_pages)
            events = others.prefill.prefill(job)
            first_event = asyncio.ensure_future(anext(events))
            await begun.wait()
            assert (await others.prefill.describe()).queued_tokens == len(ids) - 4 * PI
            if ending == "the client leaves":
                first_event.cancel()
                await asyncio.wait([first_event])
            elif ending == "the node drains":
                await others.prefill.drain(0.0)
                with pytest.raises(NodeDraining):
                    await first_event
            else:
                await close(decoding)
                go.set()
                prefilled = await first_event
                assert isinstance(prefilled, Prefilled)
                assert prefilled.computed_tokens == len(ids)
                assert await stat(others, "hackkv_fetch_failed_transfer_total") == 1
            await close(events)
            await close(decoding)
            await others.assert_idle()
        assert (await nodes.decode.describe()).free_pages == 64


async def test_a_prompt_that_waits_for_its_pages_holds_up_nobody() -> None:
    worker, ids = tiny_worker(), prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        first = await turn(nodes, ids, "first")
        way, ids = Between(nodes), longer(ids, first, 2)
        begun, go, lend = asyncio.Event(), asyncio.Event(), way.lend

        async def late(handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
            begun.set()
            await go.wait()
            async with closing(lend(handoff)) as items:
                async for item in items:
                    yield item

        way.lend = late
        async with exchanged(replace(nodes, sender=way), worker, **FETCHES) as others:
            waiting = asyncio.ensure_future(turn(others, ids, "second"))
            await begun.wait()
            other = prompt(7, 2 * PI)
            assert (await turn(others, other, "other")).tokens == cold(worker, other)
            go.set()
            served = await waiting
            assert (served.tokens, served.prefilled.fetched_tokens) == (cold(worker, ids), 4 * PI)
            await others.assert_idle()
