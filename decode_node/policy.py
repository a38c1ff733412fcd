"""Who is swapped out, and how much of a replay runs in one step: pure functions of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SOON = 8
"""A sequence that ends within so many steps gives its pages back before a swap would have paid."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be swapped out."""

    ticket: int
    """Order of arrival."""
    pages: int
    """What swapping it out would free."""
    left: int
    """Tokens until its end, at most."""


def pick_victim(candidates: Sequence[Candidate]) -> int | None:
    """Index of the sequence to swap out: the youngest that holds pages and does not end soon; None if there is none.

    The oldest is never chosen. So it always advances, whatever arrives after it, and by induction so does everybody:
    that is why age decides, and not size. A large victim would free more with one copy, but then long requests would
    be swapped over and over while short ones pass them.
    """
    if not candidates:
        return None
    oldest = min(candidate.ticket for candidate in candidates)
    choice = [i for i, it in enumerate(candidates) if it.pages > 0 and it.ticket != oldest]
    choice = [i for i in choice if candidates[i].left > SOON] or choice
    return max(choice, key=lambda i: candidates[i].ticket, default=None)


def replay_rows(start: int, rows: int, budget: int, page_tokens: int) -> int:
    """How many of `rows` rows, the first at position `start`, run in one chunk of at most `budget` rows.

    A chunk that starts inside a page ends with that page: it would otherwise overwrite the open page that a repeated
    step still has to read (`KvCodec.attend`). Any other holds whole pages, but for the last.
    """
    inside = start % page_tokens
    if inside:
        rows = min(rows, page_tokens - inside)
        return rows if rows <= budget else 0
    return rows if rows <= budget else budget // page_tokens * page_tokens
