"""If a fetch fails, comes late or is not needed any more, the prompt is computed, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from faults.injector import Injector
from faults.plan import Action, FaultPlan, FaultRule, Point
from faults.process import ProcessHands
from faults.seams import lending
from hackkv.errors import NodeDraining
from hackkv.held import HeldKv
from hackkv.types import DecodeJob, Handoff, HandoffEnd, KvFrame, Prefilled, PrefillJob, Reserved
from prefill_node.fetched import Fetched
from prefill_node.host_pool import HostPool, Tenant
from tests.pair import PI, greedy, prompt, tiny_worker
from tests.prefill_node.calls import close
from tests.prefill_node.fetching import FETCHES, FEW, cold, longer, second_turn, stat, turn
from transport.base import Lend
from transport.closing import closing

STRIKES = {
    "cut": (FaultRule(at=Point.LENT, do=Action.CUT, nth=2), "node_lost"),
    "corrupt": (FaultRule(at=Point.LENT, do=Action.CORRUPT, nth=2), "frame_refused"),
    "drop": (FaultRule(at=Point.LENT, do=Action.DROP, nth=1), "frame_refused"),
    "drop another": (FaultRule(at=Point.LENT, do=Action.DROP, nth=2), "frame_refused"),
    "duplicate": (FaultRule(at=Point.LENT, do=Action.DUPLICATE, nth=1), "frame_refused"),
}


def struck(rule: FaultRule, lend: Lend) -> Lend:
    return lending(lend, Injector(FaultPlan(rules=(rule,)), "d", ProcessHands(None)))


class Halt:
    """A `Lend` that gives one item, and the others when `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    def strike(self, lend: Lend) -> Lend:
        async def halting(handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
            async with closing(lend(handoff)) as items:
                async for item in items:
                    yield item
                    self.begun.set()
                    await self.go.wait()

        return halting


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("codec", FEW)
async def test_whatever_goes_wrong_the_prompt_is_computed(codec: str, strike: str) -> None:
    worker, (rule, code) = tiny_worker(codec), STRIKES[strike]
    async with second_turn(worker, lambda lend: struck(rule, lend), **FETCHES) as (nodes, ids):
        second = await turn(nodes, ids, "second")
        assert second.tokens == cold(worker, ids)
        assert (second.prefilled.fetched_tokens, second.prefilled.computed_tokens) == (0, len(ids))
        assert await stat(nodes, f"hackkv_fetch_failed_{code}_total") == 1


@pytest.mark.parametrize("settings", [{"prefix_fetch": "always", "fetch_s": 0.01}, {}], ids=["always", "auto"])
async def test_a_lender_that_stalls_is_given_up(settings: dict[str, Any]) -> None:
    """The node waits as long as its settings say, and with `auto` no longer than both ways should take together."""
    worker, rule = tiny_worker(), FaultRule(at=Point.LENT, do=Action.STALL)
    async with second_turn(worker, lambda lend: struck(rule, lend), **settings) as (nodes, ids):
        assert (await turn(nodes, ids, "second")).tokens == cold(worker, ids)
        assert await stat(nodes, "hackkv_fetch_failed_slow_total") == 1
        if not settings:  # with `auto`, no fetch is tried again at once
            await turn(nodes, longer(ids, await turn(nodes, ids, "third"), 4), "fourth")
            assert await stat(nodes, "hackkv_fetch_chosen_total") == 1


@pytest.mark.parametrize("ending", ["the client leaves", "the node drains", "the decode call ends"])
async def test_a_request_that_ends_in_the_middle_of_its_fetch_leaves_nothing(ending: str) -> None:
    halt = Halt()
    async with second_turn(tiny_worker(), halt.strike, **FETCHES) as (nodes, ids):
        request = greedy("r", ids, 5)
        decoding = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(decoding) == Reserved(HeldKv(4))
        events = nodes.prefill.prefill(PrefillJob(request, "r", 0, nodes.address, held=HeldKv(4)))
        first = asyncio.ensure_future(anext(events))
        await halt.begun.wait()
        assert (await nodes.prefill.describe()).queued_tokens == len(ids) - 4 * PI
        if ending == "the client leaves":
            first.cancel()
            await asyncio.wait([first])
        elif ending == "the node drains":
            await nodes.prefill.drain(0.0)
            with pytest.raises(NodeDraining):
                await first
        else:
            await close(decoding)
            halt.go.set()
            prefilled = await first
            assert isinstance(prefilled, Prefilled)
            assert prefilled.computed_tokens == len(ids)
            assert await stat(nodes, "hackkv_fetch_failed_transfer_total") == 1
        await close(events)
        await close(decoding)


async def test_a_prompt_that_waits_for_its_pages_holds_up_nobody() -> None:
    worker, halt = tiny_worker(), Halt()
    async with second_turn(worker, halt.strike, **FETCHES) as (nodes, ids):
        waiting = asyncio.ensure_future(turn(nodes, ids, "second"))
        await halt.begun.wait()
        other = prompt(7, 2 * PI)
        assert (await turn(nodes, other, "other")).tokens == cold(worker, other)
        halt.go.set()
        served = await waiting
        assert (served.tokens, served.prefilled.fetched_tokens) == (cold(worker, ids), 4 * PI)


def test_what_was_fetched_makes_room_for_kv_that_waits() -> None:
    """Fetched pages are copies of pages that the decode node has, so they yield."""
    host = HostPool(100, lambda _: None)
    fetched = Fetched(0, 1, 60)
    assert fetched.claim_room(host)
    assert not Fetched(0, 1, 101).claim_room(host)
    assert host.claim(Tenant.WAITING, 60, lambda: None) is not None
    assert (fetched.pushed_out, fetched.parts) == (True, ())
    fetched.release()
    assert host.bytes_of(Tenant.PREFIX) == 0
