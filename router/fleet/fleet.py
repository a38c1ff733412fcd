"""The fleet, put together: who is in it, what it can serve, and the desks where requests book their shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from hackkv.nodes import NodeInfo
from hackkv.types import Role
from router.config import LEASE_TTL_S, DeadlinesConfig, LimitsConfig
from router.fleet.capacity import Capacity
from router.fleet.desks import DecodeDesk, PrefillDesk
from router.fleet.holdings import Marker, Marks
from router.fleet.membership import Membership
from router.fleet.order import Ageing
from router.fleet.roster import Roster
from router.fleet.sharing import Sharing
from transport.base import DecodeNode, PrefillNode

_DEADLINES, _LIMITS = DeadlinesConfig(), LimitsConfig()


class Fleet:
    """Every node of the cluster, as the router knows them."""

    def __init__(
        self,
        dial_prefill: Callable[[str], PrefillNode],
        dial_decode: Callable[[str], DecodeNode],
        lease_ttl_s: float = LEASE_TTL_S,
        limits: LimitsConfig = _LIMITS,
        remember_s: float = _DEADLINES.queue_s,
        now: Callable[[], float] | None = None,
        *,
        by_prefix: bool = True,
    ) -> None:
        """`now` defaults to the event loop's clock. `remember_s` is how long a node that left may come back.

        `by_prefix` says whether the choice of nodes considers what they hold of a prompt.
        """
        now = now or asyncio.get_running_loop().time
        prefill = Roster(Role.PREFILL, dial_prefill, lease_ttl_s, remember_s, now)
        decode = Roster(Role.DECODE, dial_decode, lease_ttl_s, remember_s, now)
        ageing = Ageing(limits.ageing_s, limits.max_passed)
        self.nodes = Membership(prefill, decode, lease_ttl_s, self._serve_lines, now)
        self.sharing = Sharing(self.nodes, lambda: self._in_line, self._serve_lines, lease_ttl_s, now)
        self.capacity = Capacity(prefill, decode)
        self.prefill = PrefillDesk(prefill, ageing, now)
        self.decode = DecodeDesk(decode, limits.max_waiting, ageing, now)
        self._marker = Marker(self._reports if by_prefix else lambda: ())
        self._serials = count(1)

    @property
    def waiting(self) -> int:
        """Sequences in line for a node, those of the router's other processes included."""
        return self._in_line + self.sharing.waiting

    def next_serial(self) -> int:
        """A request's place in the order of arrival."""
        return next(self._serials)

    def marks(self, ids: Sequence[int], salt: str) -> Marks:
        """The marks of the first pages of `ids`, for requests with this `cache_salt`."""
        return self._marker.marks(ids, salt)

    @property
    def _in_line(self) -> int:
        return len(self.prefill) + len(self.decode)

    def _reports(self) -> Iterator[NodeInfo]:
        return (member.info for member in self.nodes.members())

    def _serve_lines(self) -> None:
        self.prefill.serve()
        self.decode.serve()
