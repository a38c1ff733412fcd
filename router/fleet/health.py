"""Whether a node failed lately, and how long requests avoid it for that."""

from __future__ import annotations

from dataclasses import dataclass, replace

_SUSPENSION_S = 1.0
_LONGEST_SUSPENSION_S = 16.0


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a node, as recent failures show it. Times are seconds on the router's clock."""

    suspended_until: float = 0.0
    """Until then requests use the node only if there is no other."""
    probing: bool = False
    """Whether the suspension is over and one request is finding out whether the node works again."""
    doubted: bool = False
    """Whether a connection broke and the node has not reported since. It may be dead, so it gets no request."""

    def usable(self, now: float) -> bool:
        """Whether requests may go there."""
        return now >= self.suspended_until and not self.probing


class Breaker:
    """Suspends a node whose connection broke. The time doubles with each failure until a request succeeds."""

    def __init__(self) -> None:
        self.health = Health()
        self.suspensions = 0
        """Suspensions of the node since it joined."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """A connection to the node broke. It gets no request before its next report.

        From then to the end of the suspension it gets one only if no other node is well.
        """
        if now < self.health.suspended_until:
            self.health = replace(self.health, doubted=True)
            return  # requests that fail together count as one failure
        pause = min(_LONGEST_SUSPENSION_S, _SUSPENSION_S * 2**self._failures)
        self._failures += 1
        self.suspensions += 1
        self.health = Health(suspended_until=now + pause, doubted=True)

    def worked(self) -> None:
        """The node answered as it should: forget failures."""
        self._failures, self.health = 0, Health()

    def reported(self) -> None:
        """The node is alive, although a connection to it may have broken before."""
        self.health = replace(self.health, doubted=False)

    def begin_probe(self, now: float) -> bool:
        """Whether the request that is being booked is the first one after a suspension, the probe."""
        is_probe = self.health.suspended_until > 0 and self.health.usable(now)
        if is_probe:
            self.health = replace(self.health, probing=True)
        return is_probe

    def end_probe(self) -> None:
        """The probe ended without a verdict: the next request may probe."""
        self.health = replace(self.health, probing=False)
