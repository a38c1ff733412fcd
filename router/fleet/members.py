"""One node of the fleet: its lease, its last report, and the work that was booked on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hackkv.errors import NodeDraining, NodeLost
from hackkv.nodes import NodeInfo
from hackkv.page_names import MOST_MARKS
from router.fleet.health import Breaker, Health
from router.fleet.holdings import Holdings, Marks
from router.fleet.policy import DecodeLoad, PrefillLoad
from router.scopes import Alarm
from transport.base import DecodeNode, PrefillNode

NodeT = TypeVar("NodeT", bound=PrefillNode | DecodeNode)


@dataclass(slots=True)
class Booked:
    """The share of one node that requests hold."""

    tokens: int = 0
    """Queued (prefill) or outstanding (decode) tokens of requests that were sent there."""
    pages: int = 0
    requests: int = 0

    def __add__(self, other: Booked) -> Booked:
        return Booked(self.tokens + other.tokens, self.pages + other.pages, self.requests + other.requests)


@dataclass(slots=True)
class Shared:
    """News of a node from the router's other processes, and news that they are to hear (`router.fleet.sharing`)."""

    booked: Booked = field(default_factory=Booked)
    """The share that their requests hold."""
    spoke: bool = False
    """Whether the node sent something to a request."""
    marks: deque[bytes] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    """Marks of pages that requests of this process make the node hold."""


class Member(Generic[NodeT]):
    """A node with a live lease, and the way to reach it."""

    def __init__(self, info: NodeInfo, node: NodeT, now: float, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.info = info
        self.node = node
        self.expires_at = now + ttl_s
        self.gone = Alarm()
        """Goes off when the node leaves the fleet, with the error that its requests get."""
        self.booked = Booked()
        """The share that requests of this process hold."""
        self.shared = Shared()
        self.chosen_at = 0
        """Number of the choice that last fell on this node."""
        self.breaker = Breaker()
        # Three reports come in the time of a lease.
        self.holdings = Holdings(settled_s=ttl_s)
        self.holdings.report(info.marks, now)
        self._room = info.free_pages
        """Pages that were free at the last report, and those that were booked then."""
        self._let_go = False

    @property
    def node_id(self) -> str:
        """The name under which the node registered."""
        return self.info.node_id

    @property
    def key(self) -> str:
        """The node's name among the nodes of both roles."""
        return f"{self.info.role} {self.info.node_id}"

    @property
    def health(self) -> Health:
        """The health of the node, as recent failures show it."""
        return self.breaker.health

    @property
    def draining(self) -> bool:
        """Whether the node is about to stop. It then finishes its requests, and this process of it gets no new ones."""
        return self.info.draining or self._let_go

    @property
    def load(self) -> Booked:
        """The share of the node that all requests hold."""
        return self.booked + self.shared.booked

    @property
    def free_pages(self) -> int:
        """Free pages of the last report, corrected by what was booked and released since.

        Never more than all pages of the node less those that are booked.
        """
        return max(0, min(self._room, self.info.total_pages) - self.load.pages)

    def held_tokens(self, marks: Marks) -> int:
        """The number of a prompt's first tokens that the node holds, by the marks of its pages."""
        return self.holdings.pages(marks) * self.info.page_tokens

    def prefill_load(self, marks: Marks = ()) -> PrefillLoad:
        """Snapshot for the policy; `marks` are those of the prompt in question."""
        held = self.held_tokens(marks)
        return PrefillLoad(self.node_id, self.load.tokens, self.chosen_at, self.health, self.draining, held)

    def decode_load(self, marks: Marks = ()) -> DecodeLoad:
        """Snapshot for the policy; `marks` are those of the prompt in question."""
        info = self.info
        return DecodeLoad(
            info.node_id,
            self.load.tokens,
            self.free_pages,
            info.total_pages,
            info.page_tokens,
            self.chosen_at,
            self.health,
            self.draining,
            self.held_tokens(marks),
        )

    def heard(self, now: float) -> None:
        """The node sent something, so it is alive. One that is too busy to report in time must not lose its lease."""
        self.shared.spoke = True
        self.alive(now)

    def alive(self, now: float) -> None:
        """Begin the lease anew."""
        self.expires_at = max(self.expires_at, now + self._ttl_s)

    def expect(self, marks: Marks, now: float) -> None:
        """A request is about to bring the node to hold these pages."""
        self.shared.marks.extend(marks)
        self.holdings.expect(marks, now)

    def renew(self, info: NodeInfo, now: float) -> None:
        """Take in a new report."""
        self.alive(now)
        self.info = info
        self.breaker.reported()
        self.holdings.report(info.marks, now)
        self._room = info.free_pages + self.load.pages

    def full(self) -> None:
        """The node refused for lack of room: it counts as full until it reports again or a booking on it ends."""
        self._room = self.load.pages

    def drain(self) -> None:
        """The node let go of a request because it is about to stop."""
        self._let_go = True

    def leave(self, why: str) -> None:
        """The node is out of the fleet; requests on it hear of it at once."""
        kind = NodeDraining if self.draining else NodeLost
        self.gone.ring(kind(f"{self.info.role} node {self.node_id} {why}"))
