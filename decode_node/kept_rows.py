"""Exact rows at the ends of sequences, in host memory, for codecs whose queries see some pages exactly (`Window`).

A prompt that goes on after kept pages needs the exact rows of the last of them, and of the first ones. These rows are
in the slot of the sequence that sealed the pages, and would be lost with it. So the slot of a sequence that ends is
copied, under the name of its last sealed page, where the next turn of its conversation goes on. This node uses the rows
for sequences of its own (`copies.py`), or lends them to a prefill node (`lending.py`).
"""

from __future__ import annotations

from hackkv.kv_memory import HostKv
from hackkv.page_names import PageName


class KeptRows:
    """The rows kept for some pages. The least recently used ones are dropped first."""

    def __init__(self, most: int) -> None:
        """Rows are kept for at most `most` pages."""
        self.most = most
        self._kept: dict[PageName, HostKv] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: PageName) -> bool:
        return name in self._kept

    def put(self, name: PageName, rows: HostKv) -> None:
        """Keep the rows with which a prompt goes on after the page `name`."""
        self._kept.pop(name, None)
        self._kept[name] = rows
        if len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]

    def of(self, name: PageName) -> HostKv | None:
        """The rows kept for `name`, which become the most recently used; None if there are none."""
        rows = self._kept.pop(name, None)
        if rows is not None:
            self._kept[name] = rows
        return rows

    def forget(self) -> None:
        """Drop all, because the contents of pages are in doubt."""
        self._kept.clear()
