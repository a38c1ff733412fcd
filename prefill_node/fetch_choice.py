"""Fetch or compute: estimates, from measurements, how long a prompt's missing pages take either way. Numbers only.

Computing takes tokens over the speed of this node's passes at these places of a prompt. Fetching takes the wait for the
first frame, and bytes over the speed of the link. The settings give speeds to assume before the first measurement. A
node that never fetches cannot find out that a slow link has become fast. So measurements of fetches are forgotten after
`BELIEVED_S` seconds. Measurements of pushes to the same node stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hackkv.wire_choice import Rate

BELIEVED_S: Final = 60.0
"""Seconds for which the measurement of a fetch counts."""
ENOUGH_BYTES: Final = 256 << 10
"""The smallest fetch that measures the speed of its link; a smaller one measures only the latency."""
ASSUMED_WAIT_S: Final = 0.005
"""Seconds until the first frame, if nothing was fetched lately."""
REMEMBERED_TOKENS: Final = 4096
"""Approximate number of tokens over which the speed of passes is averaged, for each stretch of prompts."""
FIRST_STRETCH: Final = 512
"""Tokens of the first stretch of a prompt. Each later stretch is as long as all stretches before it."""
MOST_PEERS: Final = 1024


class PrefixFetch(StrEnum):
    """Whether a node fetches pages that it lacks from the decode node that holds them."""

    AUTO = "auto"
    """Fetch if that is estimated to be faster than computing."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds to fetch pages, and seconds to compute them."""

    fetch_s: float
    compute_s: float

    def chosen(self, setting: PrefixFetch) -> bool:
        """Whether to fetch."""
        return setting is PrefixFetch.ALWAYS or (setting is PrefixFetch.AUTO and self.fetch_s < self.compute_s)

    def patience_s(self, setting: PrefixFetch, most_s: float) -> float:
        """Seconds after which to give a fetch up, at most `most_s`: the time for fetching and computing in turn."""
        return most_s if setting is PrefixFetch.ALWAYS else min(most_s, self.fetch_s + self.compute_s)


class PassSpeed:
    """Tokens per second of a node's passes. The speed falls along a prompt, so each stretch has its own."""

    def __init__(self, assumed_tokens_per_s: float) -> None:
        self._assumed_s = 1 / assumed_tokens_per_s
        self._stretches: dict[int, tuple[float, float]] = {}
        """Stretch -> tokens and seconds."""

    def ran(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Note that a pass over chunks (first token, tokens) took `seconds`. Each token counts for the same share."""
        chunks = list(chunks)
        each = seconds / sum(count for _, count in chunks)
        for start, count in chunks:
            stretch = _stretch(start + count // 2)
            tokens, spent = self._stretches.get(stretch, (0.0, 0.0))
            keeps = REMEMBERED_TOKENS / (REMEMBERED_TOKENS + count)
            self._stretches[stretch] = keeps * tokens + count, keeps * spent + each * count

    def seconds(self, first: int, end: int) -> float:
        """Seconds to compute tokens [first, end) of a prompt."""
        total = 0.0
        while first < end:
            stretch = _stretch(first)
            stop = min(end, FIRST_STRETCH << stretch)
            total += (stop - first) * self._each(stretch)
            first = stop
        return total

    def _each(self, stretch: int) -> float:
        """Seconds of a token in the nearest stretch that was measured; of two, the later one."""
        if not self._stretches:
            return self._assumed_s
        nearest = min(self._stretches, key=lambda other: (abs(other - stretch), -other))
        tokens, seconds = self._stretches[nearest]
        return seconds / tokens


@dataclass(slots=True)
class _Peer:
    """Measurements of fetches from one decode node."""

    wait: Rate
    link: Rate
    at: float


class FetchSpeed:
    """The speed of fetches from each decode node."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self._assumed_s = 1 / assumed_bytes_per_s
        self._peers: dict[str, _Peer] = {}

    def fetched(self, address: str, num_bytes: int, wait_s: float, seconds: float, now: float) -> None:
        """Note that `num_bytes` came in `seconds`, the first frame after `wait_s`."""
        peer = self._remembered(address, now)
        peer.wait.add(1, wait_s)
        if num_bytes >= ENOUGH_BYTES:
            peer.link.add(num_bytes, seconds)

    def gave_up(self, address: str, num_bytes: int, seconds: float, now: float) -> None:
        """Note that a fetch was given up when `num_bytes` had come in `seconds`. It measures the link at any size."""
        self._remembered(address, now).link.add(max(1, num_bytes), seconds)

    def seconds(self, address: str, num_bytes: int, pushes: Rate, now: float) -> float:
        """Seconds to fetch `num_bytes`. `pushes` is the rate of handoffs to the same node."""
        peer = self._known(address, now)
        wait_s = peer.wait.seconds_per_unit if peer and peer.wait.known else ASSUMED_WAIT_S
        measured = (rate for rate in (peer.link if peer else None, pushes) if rate is not None and rate.known)
        link = next(measured, None)
        return wait_s + num_bytes * (link.seconds_per_unit if link else self._assumed_s)

    def _remembered(self, address: str, now: float) -> _Peer:
        peer = self._known(address, now) or _Peer(Rate(), Rate(), now)
        self._peers.pop(address, None)
        self._peers[address] = peer
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        peer.at = now
        return peer

    def _known(self, address: str, now: float) -> _Peer | None:
        peer = self._peers.get(address)
        return peer if peer is not None and now - peer.at <= BELIEVED_S else None


def _stretch(token: int) -> int:
    return (token // FIRST_STRETCH).bit_length()
