"""Failures of NIXL: what a peer says of itself is checked, and every wait has a deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hackkv.errors import ConfigError, DeadlineExceeded, NodeLost
from tests.transport import nouns
from tests.transport.ends import Reader, Table, listening, sending
from tests.wires import lacks
from transport import nixl_link
from transport.link import Exchange, Link, link_kind, on_host
from transport.nixl_link import ADDRESS_BYTES, NixlLink, create, load_library

pytestmark = pytest.mark.skipif(bool(lacks("nixl")), reason=lacks("nixl"))


@contextmanager
def ends(exchange: Exchange) -> Iterator[tuple[Link, Link, ThreadPoolExecutor]]:
    """A connected sender and receiver, and a thread for the receiver."""
    library = load_library()
    sender, receiver = NixlLink(library, 0), NixlLink(library, 1)
    with ThreadPoolExecutor(1) as thread:
        try:
            meeting = thread.submit(receiver.connect, exchange)
            sender.connect(exchange)
            meeting.result()
            yield sender, receiver, thread
        finally:
            sender.abort()
            receiver.abort()


def fails(sender: Link) -> threading.Thread:
    """A thread that sends a parcel of three bytes, which does not arrive."""

    def send() -> None:
        with pytest.raises(NodeLost):
            sender.send(b"abc")

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_parcels_of_any_size_arrive_in_order() -> None:
    parcels = [bytes([size % 251]) * size for size in (1, 1 << 10, 8 << 20, 3, 70_001)]
    with ends(Table()) as (sender, receiver, thread):
        for parcel in parcels:
            arriving = thread.submit(receiver.post(len(parcel)))
            sender.send(parcel)
            assert bytes(arriving.result()) == parcel


def test_a_slab_that_is_elsewhere_than_its_owner_says_is_not_read() -> None:
    def moved(said: bytes) -> bytes:
        return (int.from_bytes(said[:ADDRESS_BYTES], "little") ^ 1 << 40).to_bytes(8, "little") + said[ADDRESS_BYTES:]

    with ends(Table(moved)) as (sender, receiver, thread):
        failing = fails(sender)
        with pytest.raises(NodeLost, match="nixl: NIXL_ERR_NOT_FOUND"):
            thread.submit(receiver.post(3)).result()
        sender.abort()
        failing.join()


@pytest.mark.parametrize("of", ["0", "1"])
@pytest.mark.parametrize("change", [lambda said: said[:-40], lambda said: said[:3], lambda said: b""], ids=range(3))
def test_an_end_that_cannot_be_understood_is_a_lost_node(
    change: Callable[[bytes], bytes], of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_link, "CONNECT_TIMEOUT_S", 0.2)  # the wait of the end that understood the other
    with pytest.raises((NodeLost, DeadlineExceeded)), ends(Table(change, of)):
        raise AssertionError


def test_a_parcel_of_another_place_is_a_lost_node() -> None:
    with ends(Table()) as (sender, receiver, thread):
        assert isinstance(sender, NixlLink)
        next(sender._numbers)
        failing = fails(sender)
        with pytest.raises(NodeLost, match=r"^nixl: the peer says b'here 2' where b'here 1' is due$"):
            thread.submit(receiver.post(3)).result()
        sender.abort()
        failing.join()


def test_a_peer_that_falls_silent_is_a_deadline_at_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(Table()) as (sender, receiver, thread):
        monkeypatch.setattr(nixl_link, "PARCEL_TIMEOUT_S", 0.05)
        with pytest.raises(DeadlineExceeded):
            thread.submit(receiver.post(3)).result()
        with pytest.raises(DeadlineExceeded):
            sender.send(b"abc")


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_abort_ends_a_wait_and_may_come_again(who: str) -> None:
    with ends(Table()) as (sender, receiver, thread):
        waits: Callable[[], object] = receiver.post(3) if who == "receiver" else lambda: sender.send(b"abc")
        waiting = thread.submit(waits)
        for _ in range(2):
            (receiver if who == "receiver" else sender).abort()
        with pytest.raises(NodeLost, match="the link is closed"):
            waiting.result()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_aborted_link_moves_nothing_more(who: str) -> None:
    with ends(Table()) as (sender, receiver, thread):
        moves: Callable[[], object] = receiver.post(3) if who == "receiver" else lambda: sender.send(b"abc")
        (receiver if who == "receiver" else sender).abort()
        for each in [each for each in threading.enumerate() if each.name == "abort"]:
            each.join()
        with pytest.raises(NodeLost, match="the link is closed"):
            thread.submit(moves).result()


async def test_an_error_of_nixl_is_a_lost_node_and_the_next_push_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, reads, broken = create(on_host), nixl_link.NixlLink._read, list[int]()

    def read(link: NixlLink, size: int) -> object:
        if not broken:
            broken.append(size)
            with link._translating():
                raise link._library.errors[0]("NIXL_ERR_BACKEND")
        return reads(link, size)

    monkeypatch.setattr(NixlLink, "_read", read)
    async with listening(kind, Reader()) as address, sending(kind) as sender:
        with pytest.raises(NodeLost):
            await sender.push(address, nouns.handoff(), nouns.frames(3))
        assert (await sender.push(address, nouns.handoff("t-2"), nouns.frames(3, transfer_id="t-2"))).tokens >= 4
    assert broken


def test_its_log_lines_go_where_others_go() -> None:
    load_library()
    own = logging.getLogger("nixl")
    assert (own.handlers, own.propagate, own.level, logging.raiseExceptions) == ([], True, logging.WARNING, True)


def test_what_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_link, "PACKAGES", {"13": "nixl_cu99"})
    with pytest.raises(ConfigError, match=r"^wire: nixl: there is no nixl_cu99: pip install 'hackkv\[nixl\]'[^\n]*$"):
        link_kind("nixl")
