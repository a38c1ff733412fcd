"""The pages that nodes hold, as far as the router knows: those that they report, and those that it expects since then.

Pages are known by their marks (`hackkv.page_names`), which the router makes itself from tokens. Marks are hints: a
node compares tokens and says what it really holds. A wrong guess costs time, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hackkv.nodes import NodeInfo
from hackkv.page_names import MARK_BYTES, MOST_MARKS, Naming

MOST_MARKED: Final = 1024
"""The most pages of one prompt that are looked for: naming a page takes 2 us of the event loop."""

Marks = Sequence[bytes]
"""The marks of a prompt's first pages, in order."""


class Holdings:
    """The pages of one node. Its reports may leave some out."""

    def __init__(self, settled_s: float) -> None:
        """An expected page is in the node's reports after `settled_s` seconds, or was not kept."""
        self._settled_s = settled_s
        self._packed = b""
        self._reported: frozenset[bytes] = frozenset()
        self._expected: dict[bytes, float] = {}
        """Mark -> the time until which the page is expected."""
        self.keeps = False
        """Whether the node keeps pages at all."""

    def report(self, packed: bytes | None, now: float) -> None:
        """Take a node's report in."""
        self.keeps, packed = packed is not None, packed or b""
        if packed != self._packed:
            self._packed = packed
            self._reported = frozenset(packed[at : at + MARK_BYTES] for at in range(0, len(packed), MARK_BYTES))
        self._expected = {mark: until for mark, until in self._expected.items() if until > now}

    def expect(self, marks: Marks, now: float) -> None:
        """The node is about to have these pages."""
        if not self.keeps:
            return
        for mark in marks:
            self._expected.pop(mark, None)
            self._expected[mark] = now + self._settled_s
        while len(self._expected) > MOST_MARKS:
            del self._expected[next(iter(self._expected))]

    def pages(self, marks: Marks) -> int:
        """The number of a prompt's first pages that the node holds. A node that holds a page holds those before it."""
        known = (index for index in range(len(marks), 0, -1) if self._has(marks[index - 1]))
        return next(known, 0)

    def _has(self, mark: bytes) -> bool:
        return mark in self._reported or mark in self._expected


class Marker:
    """Makes the marks of prompts, as the nodes of a fleet name their pages."""

    def __init__(self, nodes: Callable[[], Iterable[NodeInfo]]) -> None:
        self._nodes = nodes
        self._naming: tuple[object, Naming] | None = None

    def marks(self, ids: Sequence[int], salt: str) -> Marks:
        """The marks of the first pages of `ids`; none while no node keeps pages."""
        info = next((info for info in self._nodes() if info.marks is not None), None)
        if info is None:
            return ()
        key = (info.page_tokens, info.fingerprint)
        if self._naming is None or self._naming[0] != key:
            self._naming = key, Naming(*key)
        return self._naming[1].marks(ids[: MOST_MARKED * info.page_tokens], salt)
