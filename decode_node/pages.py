"""Pages and slots of a decode node as numbers, and which grant holds them. No tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """What one sequence holds: pool indices of its pages, in order, and its open page's slot."""

    pages: tuple[int, ...]
    slot: int


class PagePool:
    """Hands out pages and slots of a fixed pool. "No room" is a return value; giving back twice is an error."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self.num_slots = num_slots
        # Popped from the end, so low numbers first.
        self._pages = list(reversed(range(num_pages)))
        self._slots = list(reversed(range(num_slots)))
        self._held: dict[int, Grant] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no grant holds."""
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        """Slots that no grant holds."""
        return len(self._slots)

    def take(self, num_pages: int) -> Grant | None:
        """Take pages and one slot, or None if either is short."""
        if num_pages > len(self._pages) or not self._slots:
            return None
        pages = tuple(self._pages.pop() for _ in range(num_pages))
        grant = Grant(pages, self._slots.pop())
        self._held[grant.slot] = grant
        return grant

    def extend(self, grant: Grant, num_pages: int) -> Grant | None:
        """Return a grant with `num_pages` more pages, which replaces `grant`; None if the pages are not free.

        Raises `ValueError` when `grant` is not held.
        """
        self._check_held(grant)
        if num_pages > len(self._pages):
            return None
        grown = Grant((*grant.pages, *(self._pages.pop() for _ in range(num_pages))), grant.slot)
        self._held[grant.slot] = grown
        return grown

    def give_back(self, grant: Grant) -> None:
        """Free a grant's pages and slot. Raises `ValueError` when it is not held, even if its slot has a new holder."""
        self._check_held(grant)
        del self._held[grant.slot]
        self._pages.extend(reversed(grant.pages))
        self._slots.append(grant.slot)

    def _check_held(self, grant: Grant) -> None:
        if self._held.get(grant.slot) is not grant:
            raise ValueError(f"the grant of slot {grant.slot} is not held")
