"""A decode node lends the pages of a prompt that a reservation holds, while it holds them, and only to its peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from decode_node.inbox import Reservation
from decode_node.kept_rows import KeptRows
from decode_node.pages import Grant, PagePool
from hackkv.errors import HandshakeRefused, TransferError
from hackkv.expected import Expected
from hackkv.held import HeldKv
from hackkv.kv_memory import HostKv, HostPages
from hackkv.ledger import FrameLedger
from hackkv.page_names import Naming
from hackkv.types import WIRE_FORM, DecodeJob, Fingerprint, Handoff, HandoffEnd, Reserved
from hackkv.wire_form import WIRE_FORMS, wire_form
from tests.decode_node.calls import close
from tests.pair import PI, TIMEOUT_S, Pair, greedy, paired, prompt, tiny_worker
from tests.polling import POLL_S
from transport.closing import closing

IDS = prompt(1, 3 * PI + 5)


@asynccontextmanager
async def holding(codec: str = "hack") -> AsyncIterator[tuple[Pair, Handoff]]:
    """Nodes with a request of which the decode node holds three pages, and the handoff that asks for all of them."""
    worker = tiny_worker(codec)
    async with paired(worker) as nodes:
        await nodes.serve(greedy("first", IDS, 2))
        decoding = nodes.decode.decode(DecodeJob(greedy("r", IDS, 5), "r", 3))
        reserved = await anext(decoding)
        assert isinstance(reserved, Reserved)
        assert reserved.held.pages == 3
        yield nodes, Handoff("r", 3, worker.fingerprint, 3 * PI)
        await close(decoding)
        await nodes.assert_idle()


def in_form(fingerprint: Fingerprint, form: str) -> Fingerprint:
    return Fingerprint((*(field for field in fingerprint.fields if field[0] != WIRE_FORM), (WIRE_FORM, form)))


@pytest.mark.parametrize("form", sorted(WIRE_FORMS))
@pytest.mark.parametrize("first", range(3))
async def test_what_is_asked_for_comes_and_nothing_else(first: int, form: str) -> None:
    """Pages come in the form that the fetcher names. `FrameLedger` accepts exactly the agreed pages."""
    async with holding() as (nodes, handoff):
        worker = tiny_worker("hack")
        handoff = replace(handoff, held=HeldKv(first), fingerprint=in_form(handoff.fingerprint, form))
        expected = Expected(
            worker.layout, worker.codec.wire_planes, 3 * PI, worker.footprint, wire_form(form), held=HeldKv(first)
        )
        ledger = FrameLedger("r", 3, expected)
        async for item in nodes.decode.inbox.lend(handoff):
            if isinstance(item, HandoffEnd):
                ledger.finish(item)
            else:
                ledger.accept(item)
        counts = nodes.decode.inbox.lender.counts
        assert (counts.pages, counts.refused) == (3 - first, 0)


REFUSED = {
    "another transfer": ({"transfer_id": "s"}, "'s' are not to be lent"),
    "an earlier epoch": ({"epoch": 2}, "not to be lent"),
    "more than is held": ({"num_tokens": 4 * PI}, "but 3 pages are held"),
    "half a page": ({"num_tokens": 3 * PI - 1}, "but 3 pages are held"),
    "nothing": ({"held": HeldKv(3)}, "but 3 pages are held"),
    "no tokens": ({"num_tokens": 0}, "but 3 pages are held"),
    "another model": ({"fingerprint": Fingerprint((("model", "other"),))}, "fingerprints differ in"),
    "an unknown form": ({"fingerprint": in_form(tiny_worker("hack").fingerprint, "x")}, "wire form 'x' is unknown"),
}


@pytest.mark.parametrize("flaw", REFUSED)
async def test_other_wishes_are_refused_by_name_and_counted(flaw: str) -> None:
    changes, words = REFUSED[flaw]
    async with holding() as (nodes, handoff):
        with pytest.raises(HandshakeRefused, match=words):
            await anext(nodes.decode.inbox.lend(replace(handoff, **changes)))  # type: ignore[arg-type]
        counts = nodes.decode.inbox.lender.counts
        assert (counts.pages, counts.payload_bytes, counts.refused) == (0, 0, 1)


async def test_exact_rows_that_are_not_kept_are_not_lent() -> None:
    """The fetch asks for fewer pages than the earlier sequence had, and no sequence ended after these pages."""
    async with holding("rot-k3v2") as (nodes, handoff):
        with pytest.raises(HandshakeRefused, match="exact rows are not here with which a prompt goes on after page 1"):
            await anext(nodes.decode.inbox.lend(replace(handoff, num_tokens=2 * PI)))


async def test_pages_are_lent_to_one_at_a_time() -> None:
    async with holding() as (nodes, handoff):
        async with closing(nodes.decode.inbox.lend(handoff)) as items:
            await anext(items)
            with pytest.raises(HandshakeRefused, match="not to be lent now"):
                await anext(nodes.decode.inbox.lend(handoff))
        assert len([item async for item in nodes.decode.inbox.lend(handoff)]) > 1


async def test_lending_ends_with_the_request() -> None:
    """After its end the request's pages may have another holder, so none of them is read."""
    worker = tiny_worker("hack")
    async with paired(worker) as nodes:
        await nodes.serve(greedy("first", IDS, 2))
        decoding = nodes.decode.decode(DecodeJob(greedy("r", IDS, 5), "r", 3))
        await anext(decoding)
        items = nodes.decode.inbox.lend(Handoff("r", 3, worker.fingerprint, 3 * PI))
        await anext(items)
        await close(decoding)
        with pytest.raises(TransferError, match="was cancelled at the decode node"):
            await anext(items)
        await nodes.assert_idle()


async def test_pages_that_do_not_come_back_from_host_memory_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    worker = tiny_worker("hack")
    async with paired(worker, num_pages=4) as nodes:
        await nodes.serve(greedy("first", IDS, 2))
        async with asyncio.timeout(TIMEOUT_S):
            while nodes.decode.pool.kept.known[1] < 3:  # noqa: ASYNC110  # nothing tells of a copy's end
                await asyncio.sleep(POLL_S)
        await nodes.serve(greedy("other", prompt(2, 4 * PI), 2))
        monkeypatch.setattr(HostPages, "load", broken)
        reserve, give_back = nodes.decode.inbox.reserve, nodes.decode.pool.give_back
        reserved: list[Reservation] = []
        closed: list[bool] = []

        def reserving(*arguments: Any) -> Reservation:
            reserved.append(reserve(*arguments))
            return reserved[-1]

        def giving_back(grant: Grant) -> None:
            closed.append(reserved[0].grant.closed)
            give_back(grant)

        monkeypatch.setattr(nodes.decode.inbox, "reserve", reserving)
        monkeypatch.setattr(nodes.decode.pool, "give_back", giving_back)
        decoding = nodes.decode.decode(DecodeJob(greedy("r", IDS, 5), "r", 3))
        assert await anext(decoding) == Reserved(HeldKv(3))
        with pytest.raises(TransferError, match=r"pages of 'r' are lost|cancelled"):
            await anext(nodes.decode.inbox.lend(Handoff("r", 3, worker.fingerprint, 3 * PI)))
        with pytest.raises(TransferError, match="pages are lost"):
            await anext(decoding)
        assert closed == [True]
        await nodes.assert_idle()


def test_rows_are_kept_for_so_many_pages() -> None:
    a, b, c = Naming(PI, Fingerprint(())).names(prompt(1, 3 * PI), "")
    rows, some = KeptRows(2), HostKv((), (), 0, PI)
    for name in (a, b):
        rows.put(name, some)
    assert rows.of(a) is some
    rows.put(c, some)
    assert (a in rows, b in rows, c in rows, len(rows)) == (True, False, True, 2)
    rows.forget()
    assert rows.of(a) is None


def test_a_slot_that_a_copy_reads_is_free_when_both_have_let_go() -> None:
    for copy_ends_first in (True, False):
        pool = PagePool(4, 1)
        grant = pool.take(1)
        assert grant is not None
        pool.keep_slot(grant)
        if copy_ends_first:
            pool.free_slot(grant.slot)
            assert pool.free_slots == 0
            pool.give_back(grant)
        else:
            pool.give_back(grant)
            assert (pool.free_slots, pool.free_pages, pool.take(1)) == (0, 4, None)
            pool.free_slot(grant.slot)
        assert pool.free_slots == 1
        with pytest.raises(ValueError, match="is not held"):
            pool.keep_slot(grant)
