"""The node table: who is alive, how loaded, and who gets the next free pages.

A node is in the fleet while it renews its lease. Joining, renewing and coming back after a restart are one call,
`register`; nodes listed in the configuration are asked to `describe()` themselves and take the same path.

Load is the router's own count, exact at every moment, because everything a node does for us was dispatched here.
Only free pages are combined with the node's last report, and then the node has the last word (`Overloaded`).
Whoever finds no node, or no room on one, waits in line (`router.line`), woken by a release, a report or a new node.
Only a role that nobody has filled since the router started is refused at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import count

from hackkv.errors import HackkvError, HandshakeRefused, Overloaded, Unavailable
from hackkv.types import Fingerprint, Lease, NodeInfo, Role
from router.capacity import Memory
from router.line import Line, Patience, Place
from router.members import Booking, Member, NodeT
from router.policy import Need, pages_for, pick_decode, pick_prefill
from transport.base import DecodeNode, PrefillNode

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""Weight of the newest interval between two releases in their moving mean."""
_PATIENCE = Patience()


class Fleet:
    """All nodes that hold a live lease. Implements `transport.base.Registry`."""

    def __init__(
        self,
        dial_prefill: Callable[[str], PrefillNode],
        dial_decode: Callable[[str], DecodeNode],
        lease_ttl_s: float = 3.0,
        max_waiting: int = 1024,
        patience: Patience = _PATIENCE,
        remember_s: float = 120.0,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`now` defaults to the event loop's clock. `remember_s` is how long a node that left may come back."""
        self._dial_prefill, self._dial_decode = dial_prefill, dial_decode
        self._ttl, self._max_waiting = lease_ttl_s, max_waiting
        self._now = now or asyncio.get_running_loop().time
        self._prefill: dict[str, Member[PrefillNode]] = {}
        self._decode: dict[str, Member[DecodeNode]] = {}
        self._for_prefill: Line[Booking[PrefillNode]] = Line(
            self._take_prefill, self._prefill_fits, lambda place: False, self._now, patience
        )
        self._for_decode: Line[Booking[DecodeNode]] = Line(
            self._take_decode, self._decode_fits, self._decode_could_fit, self._now, patience
        )
        self._memory = Memory(remember_s)
        self._turns = count(1)
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
            self._for_prefill.serve()
        else:
            self._admit(info, self._decode, self._dial_decode)
            self._for_decode.serve()
        return Lease(self._ttl)

    def expire(self) -> None:
        """Take out every node whose lease has run out; requests on it fail with `NodeLost` at once."""
        self._expire(self._prefill)
        self._expire(self._decode)
        # A suspension may have run out.
        self._for_prefill.serve()
        self._for_decode.serve()

    def members(self, role: Role | None = None) -> tuple[Member[PrefillNode] | Member[DecodeNode], ...]:
        """Every live node, or those of one role."""
        prefill = () if role is Role.DECODE else self._prefill.values()
        decode = () if role is Role.PREFILL else self._decode.values()
        return (*prefill, *decode)

    @property
    def missing(self) -> tuple[Role, ...]:
        """Roles that no live node fills, those apart that are about to stop."""
        return tuple(role for role in Role if all(member.draining for member in self.members(role)))

    @property
    def known(self) -> bool:
        """Whether every role was filled since the router started, so that the limits below are known."""
        return all(self._known(role) for role in Role)

    @property
    def max_context(self) -> int:
        """Longest prompt plus output, in tokens, that every node can serve. Raises `Unavailable` before it is known."""
        known = {role: self._known(role) for role in Role}
        self._require(*(role for role, infos in known.items() if not infos))
        return min(info.max_context for infos in known.values() for info in infos)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of KV that fit on the largest decode node when it is empty."""
        return max((info.total_pages * info.page_tokens for info in self._known(Role.DECODE)), default=0)

    def next_turn(self) -> int:
        """A request's place in the order of arrival."""
        return next(self._turns)

    @property
    def waiting(self) -> int:
        """Sequences in line for a node."""
        return len(self._for_decode) + len(self._for_prefill)

    @property
    def retry_after_s(self) -> float:
        """About how long the line is, from the mean time between two releases."""
        return min(60.0, max(1.0, self._release_interval_s * (len(self._for_decode) + 1)))

    # Load -----------------------------------------------------------------------------------------------------------

    async def book_prefill(
        self, tokens: int, turn: int | None = None, avoid: AbstractSet[str] = frozenset()
    ) -> Booking[PrefillNode]:
        """Put `tokens` on the shortest prefill queue; waits for a node when those that were here are away.

        Raises `Unavailable` when there never was one.
        """
        self._require_known(Role.PREFILL)
        turn = self.next_turn() if turn is None else turn
        return await self._for_prefill.wait(turn, Need(tokens, tokens), avoid)

    def try_book_decode(
        self, need: Need, turn: int | None = None, avoid: AbstractSet[str] = frozenset(), *, recovering: bool = False
    ) -> Booking[DecodeNode] | None:
        """Hold room for KV, or None if there is none or it is kept for others.

        Raises `Overloaded` if there is not even room to wait (unless `recovering`: who was let in is not turned away),
        and `Unavailable` if there never was a decode node.
        """
        self._require_known(Role.DECODE)
        booking = self._for_decode.try_now(self.next_turn() if turn is None else turn, need, avoid)
        if booking is None and not recovering and len(self._for_decode) >= self._max_waiting:
            raise Overloaded("too many requests wait for decode capacity", self.retry_after_s)
        return booking

    async def book_decode(
        self, need: Need, turn: int | None = None, avoid: AbstractSet[str] = frozenset(), *, recovering: bool = False
    ) -> Booking[DecodeNode]:
        """Like `try_book_decode`, but stand in line."""
        turn = self.next_turn() if turn is None else turn
        if booking := self.try_book_decode(need, turn, avoid, recovering=recovering):
            return booking
        return await self._for_decode.wait(turn, need, avoid)

    # Housekeeping ---------------------------------------------------------------------------------------------------

    async def run(self, static: tuple[tuple[Role, str], ...] = ()) -> None:
        """Expire leases and poll the `static` nodes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            for role, address in static:
                tasks.create_task(self._poll_forever(role, address))

    async def _expire_forever(self) -> None:
        period = self._ttl / 4
        while True:
            due = self._now() + period
            await asyncio.sleep(period)
            late = self._now() - due
            if late > period:
                log.warning("the router was held up for %.1f s; leases are extended by as much", late)
                for member in self.members():
                    member.expires_at += late  # it was us who heard nobody
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
        if fleet is not None and (difference := fleet.mismatch(info.fingerprint, "in the fleet", "at the node")):
            raise HandshakeRefused(f"node {info.node_id} does not fit the fleet: {difference}")

    def _fingerprint(self, without: NodeInfo) -> Fingerprint | None:
        for member in self.members():
            if (member.info.role, member.node_id) != (without.role, without.node_id):
                return member.info.fingerprint
        return None

    def _admit(self, info: NodeInfo, table: dict[str, Member[NodeT]], dial: Callable[[str], NodeT]) -> None:
        member = table.get(info.node_id)
        if member is not None and (member.info.incarnation, member.info.address) == (info.incarnation, info.address):
            member.renew(info, self._now())
            return
        if member is not None:
            self._remove(table, info.node_id, "was restarted")
        self._memory.came(info)
        table[info.node_id] = Member(info, dial(info.address), self._now(), self._ttl)
        self.codec = dict(info.fingerprint.fields).get("codec", self.codec)
        log.info("%s node %s joined at %s", info.role, info.node_id, info.address)

    def _expire(self, table: dict[str, Member[NodeT]]) -> None:
        now = self._now()
        for node_id in [node_id for node_id, member in table.items() if member.expires_at <= now]:
            self._remove(table, node_id, "lost its lease")

    def _remove(self, table: dict[str, Member[NodeT]], node_id: str, why: str) -> None:
        member = table.pop(node_id)
        self._memory.left(member.info, self._now())
        log.log(logging.INFO if member.draining else logging.WARNING, "%s node %s %s", member.info.role, node_id, why)
        member.leave(why)

    def _known(self, role: Role) -> list[NodeInfo]:
        return self._memory.of(role, (member.info for member in self.members(role)), self._now())

    def _require(self, *missing: Role) -> None:
        if missing:
            raise Unavailable(f"no {' and no '.join(missing)} node is alive")

    def _require_known(self, role: Role) -> None:
        if not self.members(role) and not self._memory.knows(role):
            self._require(role)

    # What the lines ask ---------------------------------------------------------------------------------------------

    def _choose_prefill(self, place: Place) -> str | None:
        return pick_prefill((member.prefill_load() for member in self._prefill.values()), self._now(), place.avoid)

    def _choose_decode(self, place: Place) -> str | None:
        loads = (member.decode_load() for member in self._decode.values())
        return pick_decode(loads, place.need, self._now(), place.avoid)

    def _prefill_fits(self, place: Place) -> bool:
        return self._choose_prefill(place) is not None

    def _decode_fits(self, place: Place) -> bool:
        return self._choose_decode(place) is not None

    def _decode_could_fit(self, place: Place) -> bool:
        return any(member.decode_load().could_hold(place.need) for member in self._decode.values())

    def _take_prefill(self, place: Place) -> Booking[PrefillNode]:
        node_id = self._choose_prefill(place)
        assert node_id is not None, "the line serves only who fits"
        return self._book(self._prefill[node_id], place.need.whole, pages=0)

    def _take_decode(self, place: Place) -> Booking[DecodeNode]:
        node_id = self._choose_decode(place)
        assert node_id is not None, "the line serves only who fits"
        member = self._decode[node_id]
        return self._book(member, place.need.whole, pages_for(place.need.landing, member.info.page_tokens))

    def _book(self, member: Member[NodeT], tokens: int, pages: int) -> Booking[NodeT]:
        self._choices += 1
        member.chosen_at = self._choices
        return Booking(member, tokens, pages, self._now, self._on_release)

    def _on_release(self, role: Role) -> None:
        if role is Role.PREFILL:
            return
        now = self._now()
        if self._released_at is not None:
            self._release_interval_s += _SMOOTHING * (now - self._released_at - self._release_interval_s)
        self._released_at = now
        self._for_decode.serve()
