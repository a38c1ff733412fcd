"""Pairs of links: if either end fails, both get an error that names the peer, and the next push finds a sound pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event

import pytest

from hackkv.errors import DeadlineExceeded, HackkvError, HandshakeRefused, NodeLost, Overloaded
from hackkv.types import KvFrame, Payload
from tests.transport import nouns
from tests.transport.ends import Frames, Reader, Source, listening, sending
from tests.wires import EVERY_LINK
from transport.channels import ChannelPool
from transport.link import Exchange, Link, LinkKind
from transport.pairs import MAX_PAIRS, OutPairs

SENDER, RECEIVER = 0, 1
OVER_EVERY_LINK = pytest.mark.parametrize("name", EVERY_LINK)


@dataclass
class Faults:
    """Errors of the links of a test, by rank and step. Each happens once."""

    errors: dict[tuple[int, str], HackkvError] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    """Ranks of the links that were made."""
    aborted: list[int] = field(default_factory=list)
    hold: Event = field(default_factory=Event)
    """A sender's link waits for it before each parcel."""

    def __post_init__(self) -> None:
        self.hold.set()

    def strike(self, rank: int, step: str) -> None:
        if error := self.errors.pop((rank, step), None):
            raise error


class Frail:
    """A link that suffers faults."""

    def __init__(self, link: Link, rank: int, faults: Faults) -> None:
        self._link, self._rank, self._faults = link, rank, faults
        faults.opened.append(rank)

    def connect(self, exchange: Exchange) -> None:
        self._faults.strike(self._rank, "connect")
        self._link.connect(exchange)

    def post(self, size: int) -> Callable[[], Payload]:
        self._faults.strike(self._rank, "post")
        arrived = self._link.post(size)

        def wait() -> Payload:
            payload = arrived()
            self._faults.strike(self._rank, "arrive")
            return payload

        return wait

    def send(self, payload: Payload) -> None:
        self._faults.hold.wait(60)
        self._faults.strike(self._rank, "send")
        self._link.send(payload)
        self._faults.strike(self._rank, "sent")

    def abort(self) -> None:
        self._faults.aborted.append(self._rank)
        self._link.abort()


def frail(name: str, faults: Faults) -> LinkKind:
    kind = EVERY_LINK[name]()
    return replace(kind, open=lambda rank, host: Frail(kind.open(rank, host), rank, faults))


async def payloads(*contents: bytes) -> Frames:
    for seq, content in enumerate(contents):
        yield nouns.frame(seq, content)
    yield nouns.end(len(contents))


def received(reader: Reader) -> list[bytes]:
    return [bytes(item.payload) for item in reader.items if isinstance(item, KvFrame)]


@OVER_EVERY_LINK
@pytest.mark.parametrize("error", [NodeLost("cut"), DeadlineExceeded("late")], ids=lambda error: error.code)
@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (SENDER, "connect"),
        (RECEIVER, "connect"),
        (SENDER, "send"),
        (SENDER, "sent"),
        (RECEIVER, "post"),
        (RECEIVER, "arrive"),
    ],
)
async def test_a_link_that_fails_ends_the_push_at_both_ends_and_the_next_one_is_sound(
    name: str, rank: int, step: str, error: HackkvError
) -> None:
    faults, reader = Faults({(rank, step): error}), Reader()
    kind = frail(name, faults)
    async with listening(kind, reader) as address, sending(kind) as sender:
        with pytest.raises((NodeLost, DeadlineExceeded)):
            await sender.push(address, nouns.handoff(), Source(before_block=3).frames())
        if step != "connect":
            await reader.over.wait()
            assert isinstance(reader.error, (NodeLost, DeadlineExceeded))
        reader.__dict__.update(Reader().__dict__)
        assert (await sender.push(address, nouns.handoff(), payloads(b"a", b"b" * 70_000))).tokens == 3
        assert received(reader) == [b"a", b"b" * 70_000]
    assert faults.opened.count(SENDER) == 2
    assert sorted(faults.opened) == sorted(faults.aborted)


@OVER_EVERY_LINK
async def test_a_pair_that_ends_before_its_call_has_begun_leaves_no_task(name: str) -> None:
    kind = frail(name, Faults({(SENDER, "connect"): NodeLost("cut")}))
    async with listening(kind, Reader()) as address, sending(kind) as sender:
        before = asyncio.all_tasks()
        with pytest.raises(NodeLost, match="cut"):
            await sender.push(address, nouns.handoff(), payloads(b"a"))
        left = {task for task in asyncio.all_tasks() - before if "Pair." in str(task.get_coro())}
        if left:
            assert not (await asyncio.wait(left, timeout=240))[1]


@OVER_EVERY_LINK
async def test_handoffs_share_a_pair_and_one_that_is_cancelled_costs_the_others_nothing(name: str) -> None:
    faults, reader = Faults(), Reader()
    faults.hold.clear()
    kind = frail(name, faults)
    async with listening(kind, reader) as address, sending(kind) as sender:
        source = Source()
        first = asyncio.create_task(sender.push(address, nouns.handoff("t-1"), source.frames()))
        await source.blocked.wait()  # its frame is announced, and the receiver waits for the parcel
        second = asyncio.create_task(sender.push(address, nouns.handoff("t-2"), payloads(b"x" * 100_000)))
        first.cancel()
        await asyncio.wait({first})
        faults.hold.set()
        assert (await second).tokens == 2 + len(received(reader)) - 1
        assert received(reader)[-1] == b"x" * 100_000
        assert faults.opened == [SENDER, RECEIVER]
        assert not faults.aborted


@OVER_EVERY_LINK
async def test_links_that_speak_differently_are_refused_by_name(name: str) -> None:
    kind, source = EVERY_LINK[name](), Source()
    old = replace(kind, dialect="semaphore 1")
    async with listening(kind, Reader()) as address, sending(old) as sender:
        with pytest.raises(HandshakeRefused, match=f"'{kind.dialect}' here, 'semaphore 1' at the peer"):
            await sender.push(address, nouns.handoff(), source.frames())
    assert not source.touched


@OVER_EVERY_LINK
async def test_a_sender_keeps_the_pairs_that_it_used_last(name: str) -> None:
    faults, channels = Faults(), ChannelPool()
    kind = frail(name, faults)
    pairs = OutPairs(kind, "127.0.0.1", channels, most=2)
    async with listening(kind, Reader()) as a, listening(kind, Reader()) as b, listening(kind, Reader()) as c:
        for address in (a, b, a, c, a):  # c takes the place of b
            async with pairs.outlet(address):
                pass
        assert faults.opened.count(SENDER) == 3
        async with pairs.outlet(a), pairs.outlet(b), pairs.outlet(c):  # pairs in use are kept, however many
            assert faults.opened.count(SENDER) == 4
            assert faults.aborted.count(SENDER) == 1
        await pairs.close()
    await channels.close()


@OVER_EVERY_LINK
async def test_a_receiver_takes_so_many_pairs_and_says_so(name: str) -> None:
    class Idle:
        """A link that never connects: this test only counts links."""

        def connect(self, exchange: Exchange) -> None:
            exchange.put("here", b"")

        def post(self, size: int) -> Callable[[], Payload]:
            raise AssertionError

        def send(self, payload: Payload) -> None:
            raise AssertionError

        def abort(self) -> None:
            pass

    kind, channels = replace(EVERY_LINK[name](), open=lambda rank, host: Idle()), ChannelPool()
    async with listening(kind, Reader()) as address:
        crowd = [OutPairs(kind, "127.0.0.1", channels) for _ in range(2 * MAX_PAIRS + 1)]
        for pairs in crowd[:-1]:
            async with pairs.outlet(address):
                pass
        with pytest.raises(Overloaded, match=f"{2 * MAX_PAIRS} processes"):
            async with crowd[-1].outlet(address):
                pass
        for pairs in crowd:
            await pairs.close()
    await channels.close()
