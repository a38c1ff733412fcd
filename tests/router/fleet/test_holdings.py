"""Prompts go to the node that holds their beginning, unless the load there costs more than that saves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.page_names import MARK_BYTES, MOST_MARKS, Naming
from hackkv.types import WIRE_FORM, Fingerprint, Role
from router.fleet.fleet import Fleet
from router.fleet.holdings import MOST_MARKED, Holdings, Marker, Marks
from router.fleet.order import Demand
from router.fleet.policy import Need
from tests.router.runs import Run
from tests.router.scripted import FINGERPRINT, PAGE_TOKENS, Cluster, info

NAMING = Naming(PAGE_TOKENS, FINGERPRINT)
CONVERSATION = tuple(range(20 * PAGE_TOKENS))
MARKS = NAMING.marks(CONVERSATION, "")


def demand(cluster: Cluster, marks: Marks = MARKS, tokens: int = len(CONVERSATION)) -> Demand:
    return replace(cluster.demand(tokens), marks=marks)


def joined(marks: Marks) -> bytes:
    return b"".join(marks)


@given(held=st.integers(0, 20), asked=st.integers(0, 20), other=st.booleans())
def test_the_longest_prefix_that_is_held_counts(held: int, asked: int, other: bool) -> None:
    """Marks of other prompts do not matter, nor does their order in a report."""
    holdings = Holdings(settled_s=6.0)
    noise = NAMING.marks((7,) * 5 * PAGE_TOKENS, "") if other else []
    holdings.report(joined([*reversed(MARKS[:held]), *noise]), 0.0)
    assert holdings.pages(MARKS[:asked]) == min(held, asked)
    assert holdings.pages(NAMING.marks(CONVERSATION, "salt")) == 0


def test_what_is_expected_is_believed_until_it_should_have_been_reported() -> None:
    holdings = Holdings(settled_s=6.0)
    holdings.expect(MARKS, 0.0)
    assert holdings.pages(MARKS) == 0, "a node that has not said that it keeps pages"
    holdings.report(b"", 0.0)
    holdings.expect(MARKS[:8], 0.0)
    holdings.expect(MARKS[:4], 3.0)
    holdings.report(b"", 5.0)
    assert holdings.pages(MARKS) == 8
    holdings.report(b"", 7.0)
    assert holdings.pages(MARKS) == 4
    holdings.report(joined(MARKS[:2]), 10.0)
    assert holdings.pages(MARKS) == 2


def test_expectations_are_bounded_and_the_oldest_go_first() -> None:
    holdings = Holdings(settled_s=6.0)
    holdings.report(b"", 0.0)
    marks = [number.to_bytes(MARK_BYTES, "big") for number in range(MOST_MARKS + 5)]
    for mark in marks:
        holdings.expect([mark], 0.0)
    assert [holdings.pages([mark]) for mark in marks] == [0] * 5 + [1] * MOST_MARKS


def test_marks_are_made_as_the_fleet_names_pages_and_only_if_nodes_keep_some() -> None:
    keeping = info(Role.DECODE, marks=b"")
    nodes = [info(Role.PREFILL)]
    marker = Marker(lambda: nodes)
    assert marker.marks(CONVERSATION, "") == ()
    nodes.append(keeping)
    assert marker.marks(CONVERSATION, "") == MARKS
    nodes[1] = replace(keeping, fingerprint=Fingerprint((*FINGERPRINT.fields, (WIRE_FORM, "zstd"))))
    assert marker.marks(CONVERSATION, "") == MARKS
    nodes[1] = replace(keeping, fingerprint=Fingerprint((("codec", "fp16"),)))
    assert marker.marks(CONVERSATION, "") != MARKS
    assert len(marker.marks((5,) * (MOST_MARKED + 1) * PAGE_TOKENS, "")) == MOST_MARKED


@pytest.mark.parametrize(("queued", "chosen"), [(15, "p1"), (17, "p0")])
async def test_a_prompt_goes_where_it_is_held_until_the_queue_there_costs_more(
    cluster: Cluster, queued: int, chosen: str
) -> None:
    """p1 holds 16 of the prompt's 20 pages, and has to compute `queued` pages before it."""
    await cluster.report("p0", marks=b"")
    await cluster.report("p1", marks=joined(MARKS[:16]))
    desk, before = cluster.fleet.prefill, queued * PAGE_TOKENS
    member = (await desk.book(Demand(Need(before, before), 1, avoid=frozenset({"p0"})))).member
    booking = await desk.book(demand(cluster))
    assert booking.member.node_id == chosen
    held = 16 if chosen == "p1" else 0
    booking.release()
    assert member.booked.tokens == before
    assert desk.account.held_tokens == held * PAGE_TOKENS


async def test_what_is_held_is_no_work(cluster: Cluster) -> None:
    await cluster.report("p1", marks=joined(MARKS[:16]))
    booking = await cluster.fleet.prefill.book(demand(cluster))
    assert booking.member.booked.tokens == 4 * PAGE_TOKENS
    again = await cluster.fleet.prefill.book(demand(cluster))
    assert again.member is booking.member
    assert booking.member.booked.tokens == 4 * PAGE_TOKENS + 1, "the last token is always computed"


async def test_without_what_is_held_the_shortest_queue_decides(cluster: Cluster) -> None:
    for node_id in ("p0", "p1"):
        await cluster.report(node_id, marks=b"")
    await cluster.fleet.prefill.book(demand(cluster, (), 9))
    other = await cluster.fleet.prefill.book(demand(cluster, (), 5))
    assert (await cluster.fleet.prefill.book(demand(cluster, (), 1))).member is other.member


async def test_decode_nodes_too_but_never_without_room() -> None:
    cluster = await Cluster(prefill=1, decode=2).join()
    await cluster.report("d0", marks=b"")
    await cluster.report("d1", marks=joined(MARKS))
    desk = cluster.fleet.decode
    booking = desk.try_book(demand(cluster))
    assert booking is not None
    assert booking.member.node_id == "d1"
    await cluster.report("d1", marks=joined(MARKS), free_pages=0)
    full = desk.try_book(demand(cluster))
    assert full is not None
    assert full.member.node_id == "d0"


async def test_the_next_turn_finds_the_pair_of_the_last_before_any_report() -> None:
    """There are three nodes of each role. Without marks, idle nodes would be used in turn."""
    cluster = await Cluster(prefill=3, decode=3).join()
    for node_id in (*cluster.prefill, *cluster.decode):
        await cluster.report(node_id, marks=b"")
    ids, pairs = tuple(range(3 * PAGE_TOKENS)), set()
    for _ in range(4):
        run = Run(cluster, prompt=ids, max_tokens=PAGE_TOKENS)
        await run.serve()
        pairs.add((run.flight.route.prefill_node, run.flight.route.decode_node))
        ids += (*run.flight.output.token_ids, 5, 6, 7)
    assert len(pairs) == 1
    account = cluster.fleet.decode.account
    assert account.held_tokens == sum(
        (3 * PAGE_TOKENS + turn * (PAGE_TOKENS + 3) - 4) // PAGE_TOKENS * PAGE_TOKENS for turn in range(1, 4)
    )
    cluster.assert_idle()


async def test_it_can_be_switched_off() -> None:
    cluster = Cluster(prefill=1, decode=1)
    fleet = Fleet(cluster.prefill.__getitem__, cluster.decode.__getitem__, by_prefix=False)
    await fleet.nodes.register(info(Role.DECODE, "d0", marks=joined(MARKS)))
    assert fleet.marks(CONVERSATION, "") == ()


async def test_a_node_that_was_restarted_holds_nothing(cluster: Cluster) -> None:
    await cluster.report("p0", marks=joined(MARKS))
    await cluster.report("p0", marks=b"", incarnation="2")
    await asyncio.sleep(0)
    (member,) = (member for member in cluster.fleet.nodes.members(Role.PREFILL) if member.node_id == "p0")
    assert member.held_tokens(MARKS) == 0
