"""Events of a simulation, in order: a digest and counts of all, and spans for a Chrome trace if they are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from struct import pack
from typing import Any

import xxhash

_RECORD = "dqq16s"
_AT_ONCE = 4 * 1024


class EventKind(StrEnum):
    """Kinds of events."""

    ARRIVED = "arrived"
    PLACED_PREFILL = "placed_prefill"
    PLACED_DECODE = "placed_decode"
    REFUSED = "refused"
    PASS = "pass"
    FIRST_TOKEN = "first_token"
    LANDED = "landed"
    STEP = "step"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    DONE = "done"
    FAILED = "failed"
    DOWN = "down"
    UP = "up"
    SCALED = "scaled"


@dataclass(frozen=True, slots=True)
class BusySpan:
    """A time during which a node was busy."""

    node: str
    what: str
    began: float
    ended: float
    detail: int


@dataclass(slots=True)
class EventLog:
    """Equal logs have equal digests. The digest covers time, kind, node and number of every event."""

    keep_spans: bool = False
    spans: list[BusySpan] = field(default_factory=list)
    listeners: list[Callable[[EventKind, int, int, int], None]] = field(default_factory=list)
    """Called with each event: kind, node, times and request."""
    _digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    _counts: Counter[EventKind] = field(default_factory=Counter)
    _fresh: list[Any] = field(default_factory=list)
    """Time, node, number and kind of each event that is not in the digest yet. Digesting many at once is faster."""

    def add(self, now: float, kind: EventKind, node: int = -1, number: int = -1) -> None:
        """Count an event."""
        fresh = self._fresh
        fresh += (now, node, number, kind)
        if len(fresh) == _AT_ONCE:
            self._take()
        if self.listeners:
            for hear in self.listeners:
                hear(kind, node, number if kind is EventKind.STEP else 1, number)

    def span(self, node: str, what: str, began: float, ended: float, detail: int) -> None:
        """Keep a span, if spans are kept."""
        if self.keep_spans:
            self.spans.append(BusySpan(node, what, began, ended, detail))

    @property
    def hexdigest(self) -> str:
        """Digest of all events so far."""
        self._take()
        return self._digest.hexdigest()

    @property
    def counts(self) -> Counter[EventKind]:
        """Events so far, by kind."""
        self._take()
        return self._counts

    def _take(self) -> None:
        fresh, self._fresh = self._fresh, []
        kinds = fresh[3::4]
        self._counts.update(kinds)
        fresh[3::4] = [kind.encode() for kind in kinds]
        self._digest.update(pack("<" + len(kinds) * _RECORD, *fresh))
