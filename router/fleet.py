"""The node table: who is alive, how loaded, and who gets the next free pages.

A node is in the fleet while it renews its lease. Joining, renewing and coming back after a restart are one call,
`register`; nodes listed in the configuration are asked to `describe()` themselves and take the same path.

Load is the router's own count, exact at every moment, because everything a node does for us was dispatched here.
Only free pages are combined with the node's last report, and then the node has the last word (`Overloaded`).
Whoever finds no room waits in line: strictly first come, first served, woken by a release, a report or a new node.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from time import monotonic

from hackkv.errors import HackkvError, HandshakeRefused, Overloaded, Unavailable
from hackkv.types import Fingerprint, Lease, NodeInfo, Role
from router.members import Booking, Member, NodeT
from router.policy import pages_for, pick_decode, pick_prefill
from transport.base import DecodeNode, PrefillNode

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""Weight of the newest interval between two releases in their moving mean."""


class _Waiter:
    """Someone in line for room on a decode node."""

    def __init__(self, tokens: int, avoid: AbstractSet[str]) -> None:
        self.tokens, self.avoid = tokens, avoid
        self.future: asyncio.Future[Booking[DecodeNode]] = asyncio.get_running_loop().create_future()


class Fleet:
    """All nodes that hold a live lease. Implements `transport.base.Registry`."""

    def __init__(
        self,
        dial_prefill: Callable[[str], PrefillNode],
        dial_decode: Callable[[str], DecodeNode],
        lease_ttl_s: float = 3.0,
        max_waiting: int = 1024,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._dial_prefill, self._dial_decode = dial_prefill, dial_decode
        self._ttl, self._max_waiting, self._now = lease_ttl_s, max_waiting, now
        self._prefill: dict[str, Member[PrefillNode]] = {}
        self._decode: dict[str, Member[DecodeNode]] = {}
        self._waiters: deque[_Waiter] = deque()
        self._choices = 0
        self.codec = "unknown"
        """Name of the fleet's codec, as its fingerprint has it; a label of metrics."""
        self._released_at: float | None = None
        self._release_interval_s = 1.0

    # Membership -----------------------------------------------------------------------------------------------------

    async def register(self, info: NodeInfo) -> Lease:
        """Join, renew or return. Raises `HandshakeRefused` naming a field that differs from the fleet's."""
        self._check(info)
        if info.role is Role.PREFILL:
            self._admit(info, self._prefill, self._dial_prefill)
        else:
            self._admit(info, self._decode, self._dial_decode)
            self._seat_waiters()
        return Lease(self._ttl)

    def expire(self) -> None:
        """Take out every node whose lease has run out; requests on it fail with `NodeLost` at once."""
        now = self._now()
        for table in (self._prefill, self._decode):
            for node_id in [node_id for node_id, member in table.items() if member.expires_at <= now]:
                member = table.pop(node_id)
                member.gone.set()
                log.warning("%s node %s lost its lease", member.info.role, node_id)
        self._seat_waiters()

    def members(self, role: Role | None = None) -> tuple[Member[PrefillNode] | Member[DecodeNode], ...]:
        """Every live node, or those of one role."""
        prefill = () if role is Role.DECODE else self._prefill.values()
        decode = () if role is Role.PREFILL else self._decode.values()
        return (*prefill, *decode)

    @property
    def missing(self) -> tuple[Role, ...]:
        """Roles that no live node fills."""
        return tuple(role for role, table in ((Role.PREFILL, self._prefill), (Role.DECODE, self._decode)) if not table)

    @property
    def max_context(self) -> int:
        """Longest prompt plus output, in tokens, that every live node can serve. Raises `Unavailable` without nodes."""
        self._require(*self.missing)
        return min(member.info.max_context for member in self.members())

    @property
    def max_request_tokens(self) -> int:
        """Tokens of KV that fit on the largest decode node when it is empty."""
        return max((member.info.total_pages * member.info.page_tokens for member in self._decode.values()), default=0)

    @property
    def waiting(self) -> int:
        """Sequences in line for a decode node."""
        return len(self._waiters)

    @property
    def retry_after_s(self) -> float:
        """About how long the line is, from the mean time between two releases."""
        return min(60.0, max(1.0, self._release_interval_s * (len(self._waiters) + 1)))

    # Load -----------------------------------------------------------------------------------------------------------

    def book_prefill(self, tokens: int, avoid: AbstractSet[str] = frozenset()) -> Booking[PrefillNode]:
        """Put `tokens` on the shortest prefill queue. Raises `Unavailable` when there is no prefill node."""
        node_id = pick_prefill((member.prefill_load() for member in self._prefill.values()), self._now(), avoid)
        if node_id is None:
            raise Unavailable("no prefill node is alive")
        return self._book(self._prefill[node_id], tokens, pages=0)

    def try_book_decode(self, tokens: int, avoid: AbstractSet[str] = frozenset()) -> Booking[DecodeNode] | None:
        """Hold room for `tokens` tokens of KV, or None if there is none or others wait for it already.

        Raises `Overloaded` if there is not even room to wait, and `Unavailable` if there is no decode node.
        """
        self._require(*(role for role in self.missing if role is Role.DECODE))
        if not self._waiters and (booking := self._book_decode(tokens, avoid)):
            return booking
        if len(self._waiters) >= self._max_waiting:
            raise Overloaded("too many requests wait for decode capacity", self.retry_after_s)
        return None

    async def book_decode(self, tokens: int, avoid: AbstractSet[str] = frozenset()) -> Booking[DecodeNode]:
        """Like `try_book_decode`, but stand in line."""
        if booking := self.try_book_decode(tokens, avoid):
            return booking
        waiter = _Waiter(tokens, avoid)
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # Cancelled between being served and waking up: the room must not stay held.
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._seat_waiters()

    # Housekeeping ---------------------------------------------------------------------------------------------------

    async def run(self, static: tuple[tuple[Role, str], ...] = ()) -> None:
        """Expire leases and poll the `static` nodes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            for role, address in static:
                tasks.create_task(self._poll_forever(role, address))

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 4)
            self.expire()

    async def _poll_forever(self, role: Role, address: str) -> None:
        dial: Callable[[str], PrefillNode | DecodeNode]
        dial = self._dial_prefill if role is Role.PREFILL else self._dial_decode
        node, last_error = dial(address), ""
        while True:
            try:
                async with asyncio.timeout(self._ttl):
                    await self.register(replace(await node.describe(), role=role, address=address))
                last_error = ""
            except (HackkvError, TimeoutError) as error:
                reason = str(error) or "no answer"
                if reason != last_error:  # once per change, not three times a lease
                    log.warning("%s node at %s: %s", role, address, reason)
                last_error = reason
            await asyncio.sleep(self._ttl / 3)

    # Internals ------------------------------------------------------------------------------------------------------

    def _check(self, info: NodeInfo) -> None:
        if info.max_context <= 0 or (info.role is Role.DECODE and (info.page_tokens <= 0 or info.total_pages <= 0)):
            raise HandshakeRefused(
                f"node {info.node_id}: max_context {info.max_context}, page_tokens {info.page_tokens}, "
                f"total_pages {info.total_pages} must be positive"
            )
        fleet = self._fingerprint(without=info)
        if fleet is not None and (difference := fleet.mismatch(info.fingerprint)):
            raise HandshakeRefused(f"node {info.node_id} does not fit the fleet: {difference}")

    def _fingerprint(self, without: NodeInfo) -> Fingerprint | None:
        for member in self.members():
            if (member.info.role, member.node_id) != (without.role, without.node_id):
                return member.info.fingerprint
        return None

    def _admit(self, info: NodeInfo, table: dict[str, Member[NodeT]], dial: Callable[[str], NodeT]) -> None:
        expires_at = self._now() + self._ttl
        member = table.get(info.node_id)
        if member is not None and (member.info.incarnation, member.info.address) == (info.incarnation, info.address):
            member.renew(info, expires_at)
            return
        if member is not None:
            del table[info.node_id]
            member.gone.set()
        table[info.node_id] = Member(info, dial(info.address), expires_at)
        self.codec = dict(info.fingerprint.fields).get("codec", self.codec)
        log.info("%s node %s joined at %s", info.role, info.node_id, info.address)

    def _require(self, *missing: Role) -> None:
        if missing:
            raise Unavailable(f"no {' and no '.join(missing)} node is alive")

    def _book(self, member: Member[NodeT], tokens: int, pages: int) -> Booking[NodeT]:
        self._choices += 1
        member.chosen_at = self._choices
        return Booking(member, tokens, pages, self._now, self._on_release)

    def _book_decode(self, tokens: int, avoid: AbstractSet[str]) -> Booking[DecodeNode] | None:
        node_id = pick_decode((member.decode_load() for member in self._decode.values()), tokens, self._now(), avoid)
        if node_id is None:
            return None
        member = self._decode[node_id]
        return self._book(member, tokens, pages_for(tokens, member.info.page_tokens))

    def _on_release(self, role: Role) -> None:
        if role is Role.PREFILL:
            return
        now = self._now()
        if self._released_at is not None:
            self._release_interval_s += _SMOOTHING * (now - self._released_at - self._release_interval_s)
        self._released_at = now
        self._seat_waiters()

    def _seat_waiters(self) -> None:
        """Serve the line from its head; the head is never overtaken, so nobody starves."""
        while self._waiters:
            waiter = self._waiters[0]
            if not self._decode:
                self._waiters.popleft()
                waiter.future.set_exception(Unavailable("no decode node is alive"))
            elif waiter.future.done():
                self._waiters.popleft()
            elif booking := self._book_decode(waiter.tokens, waiter.avoid):
                self._waiters.popleft()
                waiter.future.set_result(booking)
            else:
                return
