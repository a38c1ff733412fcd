"""A share of one node that a request holds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from hackkv.errors import NodeDraining, NodeLost
from hackkv.nodes import NodeInfo
from router.fleet.holdings import Marks
from router.fleet.members import Member, NodeT
from router.fleet.wires import kv_address
from router.scopes import Alarm, guarded

T = TypeVar("T")


class Booking(Generic[NodeT]):
    """A request's share of a node, from dispatch to `release`. A context manager, so it cannot leak."""

    def __init__(
        self,
        member: Member[NodeT],
        tokens: int,
        pages: int,
        now: Callable[[], float],
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        self.member = member
        self._tokens, self._pages, self._now, self._on_release = tokens, pages, now, on_release
        self._held = True
        self._suspensions = member.breaker.suspensions
        member.booked.tokens += tokens
        member.booked.pages += pages
        member.booked.requests += 1
        # The first request after a suspension is the probe: others avoid the node until it knows whether it works.
        self._probe = member.breaker.begin_probe(now())

    @property
    def node(self) -> NodeT:
        """The node itself."""
        return self.member.node

    def kv_address(self, prefill: NodeInfo) -> str:
        """The address to which `prefill` sends KV for this decode node. Raises `NodeLost` if they share no wire."""
        return kv_address(prefill, self.member.info)

    async def guard(self, work: Coroutine[Any, Any, T], *alarms: Alarm) -> T:
        """The result of `work` on the node, unless the node leaves the fleet or another alarm goes off.

        A node that drains is not at fault when it drops a request: `NodeLost` then becomes `NodeDraining`.
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

    def will_hold(self, marks: Marks) -> None:
        """The node is about to hold these pages."""
        self.member.expect(marks, self._now())

    def worked(self) -> None:
        """The node did its part. Past failures are forgotten, unless the node was suspended after this booking: what
        was read now may have been sent before the node died."""
        self.heard()
        if self._suspensions == self.member.breaker.suspensions:
            self.member.breaker.worked()
        self._probe = False

    def failed(self) -> None:
        """The node was lost under this request."""
        self.member.breaker.failed(self._now())
        self._probe = False

    def drained(self) -> None:
        """The node let go of this request because it is about to stop."""
        self.member.drain()
        self._probe = False

    def refused(self) -> None:
        """The node has no room after all. Stop counting its pages now: `release` must not free what was never held."""
        self.member.booked.pages -= self._pages
        self._pages = 0
        self.member.full()

    def release(self) -> None:
        """Give everything back; more calls do nothing."""
        if not self._held:
            return
        self._held = False
        self.member.booked.tokens -= self._tokens
        self.member.booked.pages -= self._pages
        self.member.booked.requests -= 1
        if self._probe:
            self.member.breaker.end_probe()
        self._on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
