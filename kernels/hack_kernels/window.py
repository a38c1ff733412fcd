"""Which pages a query sees exactly: its own, the first ones of its sequence (sinks) and the last ones before its own.

A slot of a `Pool` holds the exact rows of a sequence. A sink page g has the place g; any other page has a place in a
ring behind the sinks. A page that leaves the ring gives its place to the page that enters. With no sinks and no recent
pages, a slot is the open page alone.

Letters: g, p pages, Π rows of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

MOST_SINKS: Final = 2
MOST_RECENT: Final = 2
MOST_EXACT: Final = 3
"""The most exact pages beside a query's own."""


@dataclass(frozen=True, slots=True)
class Window:
    """A query of page p sees page p, pages p - 1 .. p - `recent` and pages 0 .. `sink` - 1 exactly, others as codes.

    Raises `ValueError` naming the number that is too large.
    """

    sink: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("sink", self.sink, MOST_SINKS),
            ("recent", self.recent, MOST_RECENT),
            ("sink + recent", self.sink + self.recent, MOST_EXACT),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it must lie in 0..{most}")

    @property
    def pages(self) -> int:
        """Pages of a slot."""
        return self.sink + self.recent + 1

    def place(self, page: int) -> int:
        """The place of `page` in a slot, in pages."""
        return page if page < self.sink else self.sink + (page - self.sink) % (self.recent + 1)

    def coded(self, page: int) -> range:
        """The pages that a query of `page` sees as codes."""
        sinks = min(self.sink, page)
        return range(sinks, max(sinks, page - self.recent))

    def earlier(self, page: int) -> tuple[int, ...]:
        """The pages before `page` that its queries see exactly, in order."""
        coded = self.coded(page)
        return (*range(coded.start), *range(coded.stop, page))

    def runs(self, rows: int, page_tokens: int, first: int = 0) -> tuple[slice, ...]:
        """The places in its slot of the exact rows of a sequence of `rows` rows, page after page from number `first`
        on. No run is empty. The open page is one of them."""
        page, rest = divmod(rows, page_tokens)
        places = [(self.place(g) * page_tokens, page_tokens) for g in self.earlier(page) if g >= first]
        places += [(self.place(page) * page_tokens, rest)] * bool(rest)
        return tuple(slice(start, start + count) for start, count in places)

    def exact_rows(self, rows: int, page_tokens: int, first: int = 0) -> int:
        """The number of rows that are kept exactly of a sequence of `rows` rows, in pages from number `first` on."""
        page, rest = divmod(rows, page_tokens)
        coded = self.coded(page)
        return (max(0, coded.start - first) + max(0, page - max(coded.stop, first))) * page_tokens + rest

    def at(self, rows: Tensor, page_tokens: int) -> Tensor:
        """The places of rows with numbers `rows` in their slots, int64."""
        page = rows // page_tokens
        ring = self.sink + (page - self.sink) % (self.recent + 1)
        return page.where(page < self.sink, ring) * page_tokens + rows % page_tokens


OWN_PAGE_ONLY: Final = Window()
