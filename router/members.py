"""One node of the fleet, and a share of its capacity that a request holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from hackkv.errors import HackkvError, NodeDraining, NodeLost
from hackkv.types import NodeInfo, Role
from router.policy import DecodeLoad, Health, PrefillLoad
from router.scopes import guarded
from transport.base import DecodeNode, PrefillNode

_SUSPENSION_S = 1.0
_LONGEST_SUSPENSION_S = 16.0


NodeT = TypeVar("NodeT", bound=PrefillNode | DecodeNode)
T = TypeVar("T")


class Member(Generic[NodeT]):
    """A node with a live lease: its last report, the way to reach it, and what we have given it to do."""

    def __init__(self, info: NodeInfo, node: NodeT, now: float, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.info = info
        self.node = node
        self.expires_at = now + ttl_s
        self.gone: asyncio.Future[HackkvError] = asyncio.get_running_loop().create_future()
        """Done when the node has left the fleet, with what its requests are told."""
        self.tokens = 0
        """Queued (prefill) or outstanding (decode) tokens of requests that we sent there."""
        self.pages = 0
        self.requests = 0
        self.chosen_at = 0
        self.health = Health()
        self.suspensions = 0
        self._pages_at_report = 0
        self._free_at_report = info.free_pages
        self._failures = 0
        self._let_go = False

    @property
    def draining(self) -> bool:
        """The node is about to stop: it finishes what it has, and this process of it gets nothing new."""
        return self.info.draining or self._let_go

    @property
    def node_id(self) -> str:
        """The name under which the node registered."""
        return self.info.node_id

    def heard(self, now: float) -> None:
        """It sent us something, so it is alive: a node that is too busy to report in time must not lose its lease."""
        self.expires_at = max(self.expires_at, now + self._ttl_s)

    def renew(self, info: NodeInfo, now: float) -> None:
        """Take in a new report; the node is alive, whatever happened to a connection of ours before."""
        self.heard(now)
        self.info = info
        self.health = replace(self.health, doubted=False)
        self._free_at_report, self._pages_at_report = info.free_pages, self.pages

    @property
    def free_pages(self) -> int:
        """The last report, corrected by what we booked and released since; never more than we left over ourselves."""
        reported = self._free_at_report - (self.pages - self._pages_at_report)
        return max(0, min(reported, self.info.total_pages - self.pages))

    def full(self) -> None:
        """The node refused for lack of room: believe it until it reports again or something of ours ends there."""
        self._free_at_report, self._pages_at_report = 0, self.pages

    def prefill_load(self) -> PrefillLoad:
        """Snapshot for the policy."""
        return PrefillLoad(self.node_id, self.tokens, self.chosen_at, self.health, self.draining)

    def decode_load(self) -> DecodeLoad:
        """Snapshot for the policy."""
        info = self.info
        return DecodeLoad(
            info.node_id,
            self.tokens,
            self.free_pages,
            info.total_pages,
            info.page_tokens,
            self.chosen_at,
            self.health,
            self.draining,
        )

    def suspend(self, now: float) -> None:
        """A connection to it broke: nothing new before its next report, and then only if no other node is well, for a
        while that doubles until a request succeeds."""
        if now < self.health.suspended_until:
            self.health = replace(self.health, doubted=True)
            return  # many requests fail together; that is one failure
        pause = min(_LONGEST_SUSPENSION_S, _SUSPENSION_S * 2**self._failures)
        self._failures += 1
        self.suspensions += 1
        self.health = Health(suspended_until=now + pause, doubted=True)

    def trust(self) -> None:
        """It answered as it should: forget failures."""
        self._failures, self.health = 0, Health()

    def drain(self) -> None:
        """It let go of a request because it is about to stop."""
        self._let_go = True

    def leave(self, why: str) -> None:
        """The node is out of the fleet; requests on it hear of it at once."""
        kind = NodeDraining if self.draining else NodeLost
        if not self.gone.done():
            self.gone.set_result(kind(f"{self.info.role} node {self.node_id} {why}"))


class Booking(Generic[NodeT]):
    """A request's share of a node, from dispatch to `release`. A context manager, so it cannot leak."""

    def __init__(
        self,
        member: Member[NodeT],
        tokens: int,
        pages: int,
        now: Callable[[], float],
        on_release: Callable[[Role], None],
    ) -> None:
        self.member = member
        self._tokens, self._pages, self._now, self._on_release = tokens, pages, now, on_release
        self._held = True
        self._suspensions = member.suspensions
        member.tokens += tokens
        member.pages += pages
        member.requests += 1
        # The first request after a suspension finds out whether the node works again; others wait for its word.
        self._probe = member.health.suspended_until > 0 and member.health.usable(now())
        if self._probe:
            member.health = replace(member.health, probing=True)

    @property
    def node(self) -> NodeT:
        """The node itself."""
        return self.member.node

    @property
    def address(self) -> str:
        """Where other nodes reach it."""
        return self.member.info.address

    async def guard(self, work: Coroutine[Any, Any, T], *alarms: asyncio.Future[HackkvError]) -> T:
        """The result of `work` on the node, unless the node leaves the fleet or another alarm goes off.

        What a node that drains does to its requests is no fault: then `NodeLost` is a `NodeDraining`.
        """
        try:
            return await guarded(work, self.member.gone, *alarms)
        except NodeDraining:
            self.drained()
            raise
        except NodeLost as error:
            if not self.member.draining:
                self.failed()
                raise
            self.drained()
            raise NodeDraining(str(error)) from error

    def heard(self) -> None:
        """The node sent something."""
        self.member.heard(self._now())

    def worked(self) -> None:
        """The node did its part. If it failed others since this request left for it, that is old news: it may be dead
        by now, and what it sent before has only just been read."""
        self.heard()
        if self._suspensions == self.member.suspensions:
            self.member.trust()
        self._probe = False

    def failed(self) -> None:
        """The node was lost under this request."""
        self.member.suspend(self._now())
        self._probe = False

    def drained(self) -> None:
        """The node let go of this request because it is about to stop."""
        self.member.drain()
        self._probe = False

    def refused(self) -> None:
        """The node has no room after all: stop counting at once, so that release does not free what was never had."""
        self.member.pages -= self._pages
        self._pages = 0
        self.member.full()

    def release(self) -> None:
        """Give everything back; more calls do nothing."""
        if not self._held:
            return
        self._held = False
        self.member.tokens -= self._tokens
        self.member.pages -= self._pages
        self.member.requests -= 1
        if self._probe:  # neither worked nor failed: let the next request try
            self.member.health = replace(self.member.health, probing=False)
        self._on_release(self.member.info.role)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
