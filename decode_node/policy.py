"""The choice of the sequence to swap out, and of the rows of a replay in one step: pure functions of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SOON = 8
"""Number of steps. A sequence that ends within them gives its pages back before a swap would pay."""


@dataclass(frozen=True, slots=True)
class SwapCandidate:
    """A sequence that could be swapped out."""

    order: int
    """Order of landing."""
    pages: int
    """Pages that swapping it out would free."""
    left: int
    """The most tokens until its end."""


def pick_victim(candidates: Sequence[SwapCandidate]) -> int | None:
    """Index of the sequence to swap out: the youngest that holds pages and does not end soon; None if there is none.

    If only sequences that end soon remain, the youngest of them is chosen. The oldest is never chosen. So the oldest
    always advances, whatever arrives after it, and by induction every sequence does. For that reason age decides and
    not size. A large victim would free more with one copy, but long requests would then be swapped again and again
    while short ones pass them.
    """
    if not candidates:
        return None
    oldest = min(candidate.order for candidate in candidates)
    choice = [i for i, it in enumerate(candidates) if it.pages > 0 and it.order != oldest]
    choice = [i for i in choice if candidates[i].left > SOON] or choice
    return max(choice, key=lambda i: candidates[i].order, default=None)


def replay_rows(start: int, rows: int, budget: int, page_tokens: int, *, by_page: bool = False) -> int:
    """The number of rows, of `rows` from row `start` on, that run in one chunk of at most `budget`.

    A chunk that starts inside a page ends with that page at the latest. With `by_page` every chunk does. Otherwise a
    chunk would overwrite rows of its slot that a repeated step still has to read (`KvCodec.attend`). Any other chunk
    but the last holds whole pages.
    """
    inside = start % page_tokens
    if inside or by_page:
        rows = min(rows, page_tokens - inside)
        return rows if rows <= budget else 0
    return rows if rows <= budget else budget // page_tokens * page_tokens
