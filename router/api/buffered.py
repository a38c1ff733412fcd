"""Bytes of request bodies in memory: one budget for all clients, claimed as the bytes come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hackkv.errors import Overloaded


class BodyBudget:
    """Bytes that bodies hold together. No client may hold more than half of them, but every one may hold `least`."""

    def __init__(self, limit: int, least: int) -> None:
        """`least` is the size of the largest body."""
        self._limit, self._share = max(limit, least), max(limit // 2, least)
        self._held: Counter[str] = Counter()
        self.held = 0

    @contextmanager
    def account(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the number of bytes that come, before they are kept.

        The function raises `Overloaded` if they do not fit. All are given back at the end of the block.
        """
        mine = 0

        def claim(count: int) -> None:
            nonlocal mine
            if self.held + count > self._limit or self._held[client] + count > self._share:
                raise Overloaded("too many bytes of request bodies are on their way")
            mine += count
            self.held += count
            self._held[client] += count

        try:
            yield claim
        finally:
            self.held -= mine
            self._held[client] -= mine
            self._held += Counter()  # drops those that hold nothing
