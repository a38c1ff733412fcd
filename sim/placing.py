"""Which replica gets a job: the router's own policy over the loads of a fleet.

`router.fleet.policy` looks at every node for each request. That is right for the fleet of one router, and slow for
thousands of replicas. `Shelf` keeps loads in arrays and gives the same answer. It asks the policy itself where nodes
are to be avoided or hold a part of the prompt. `tests/sim/test_placing.py` holds both against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat

import numpy as np
import numpy.typing as npt

from router.fleet.policy import DecodeLoad, Need, PrefillLoad, pages_for, pick_decode, pick_prefill

_AGE_BITS = 26
"""Bits of a key for the time of the last choice; the load takes the bits above."""
_NEVER = int(np.iinfo(np.int64).max)


class Shelf:
    """Loads of the replicas of one role. Indices are places in `names`, which are sorted."""

    def __init__(self, names: Sequence[str], total_pages: Sequence[int], page_tokens: int) -> None:
        """`total_pages` are those of each replica."""
        if list(names) != sorted(names):
            raise ValueError("names are not sorted")
        self.names = list(names)
        self._page_tokens = page_tokens
        self._total = np.array(total_pages, dtype=np.int64)
        self._least_total = min(total_pages, default=0)
        size = len(self.names)
        self.tokens = [0] * size
        """Tokens booked on each replica: queued ones for prefill, outstanding ones for decode."""
        self.free = self._total.copy()
        """Free pages of each replica, as the router believes."""
        self.up = [True] * size
        """Whether each replica takes requests."""
        self._chosen = [0] * size
        self._choices = count(1)
        self._keys = np.zeros(size, dtype=np.int64)
        """Keys that order replicas by tokens, then by the last choice. A replica that is away has `_NEVER`."""

    def pick_prefill(self, avoid: frozenset[int] = frozenset(), held: Sequence[int] = ()) -> int | None:
        """The replica with the fewest tokens to compute; None if all are away. `held` are the prompt's tokens that each
        replica holds; empty if no replica holds any."""
        if avoid or held:
            loads = [
                PrefillLoad(name, self.tokens[index], self._chosen[index], draining=not self.up[index], held_tokens=has)
                for index, (name, has) in enumerate(zip(self.names, held or repeat(0), strict=False))
            ]
            return self._named(pick_prefill(loads, avoid={self.names[index] for index in avoid}))
        return self._least(self._keys)

    def pick_decode(self, need: Need, avoid: frozenset[int] = frozenset(), held: Sequence[int] = ()) -> int | None:
        """The replica with the fewest outstanding tokens among those with room; None if none has room. `held` is as in
        `pick_prefill`."""
        if avoid or held:
            away = {self.names[index] for index in avoid}
            return self._named(pick_decode(self._decode_loads(held or repeat(0)), need, avoid=away))
        landing, whole = pages_for(need.landing, self._page_tokens), pages_for(need.whole, self._page_tokens)
        keys = self._keys if whole <= self._least_total else np.where(self._total >= whole, self._keys, _NEVER)
        best = self._least(keys)
        if best is None or self.free[best] >= landing:
            return best
        return self._least(np.where(self.free >= landing, keys, _NEVER))

    def could_hold(self, need: Need) -> bool:
        """Whether a replica that is up would have room once all others have ended."""
        whole = pages_for(need.whole, self._page_tokens)
        if whole <= self._least_total:
            return any(self.up)
        return bool(np.any(self._total[self.up] >= whole))

    def choose(self, index: int, tokens: int = 0) -> None:
        """Note that a replica was chosen, and add tokens to its account."""
        self._chosen[index] = next(self._choices)
        self.tokens[index] += tokens
        self._renew(index)

    def book(self, index: int, tokens: int) -> None:
        """Add tokens to a replica's account; a negative number takes them off."""
        self.tokens[index] += tokens
        self._renew(index)

    def mark(self, index: int, *, up: bool) -> None:
        """Say whether a replica takes requests."""
        self.up[index] = up
        self._renew(index)

    def _renew(self, index: int) -> None:
        key = self.tokens[index] << _AGE_BITS | self._chosen[index]
        self._keys[index] = key if self.up[index] else _NEVER

    def _decode_loads(self, held: Iterable[int]) -> list[DecodeLoad]:
        return [
            DecodeLoad(
                name,
                self.tokens[index],
                int(self.free[index]),
                int(self._total[index]),
                self._page_tokens,
                self._chosen[index],
                draining=not self.up[index],
                held_tokens=has,
            )
            for index, (name, has) in enumerate(zip(self.names, held, strict=False))
        ]

    def _least(self, keys: npt.NDArray[np.int64]) -> int | None:
        if not self.names:
            return None
        best = int(keys.argmin())
        return None if keys[best] == _NEVER else best

    def _named(self, name: str | None) -> int | None:
        return None if name is None else self.names.index(name)
