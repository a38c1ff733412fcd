"""KV of a prompt that a receiver has before it is sent any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HeldKv:
    """KV of a prompt that a receiver has from earlier requests. It does not travel."""

    pages: int = 0
    """The prompt's first pages, as they rest."""
    exact: int = 0
    """The number of these pages after which a prompt may go on: the exact rows that its queries see are here too."""

    @property
    def words(self) -> str:
        """The counts, for a message."""
        return f"{self.pages} pages and the exact rows of {self.exact}"


NOTHING_HELD: Final = HeldKv()
