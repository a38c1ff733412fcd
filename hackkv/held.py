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
    """A prompt may go on after so many of these pages: the rows that its queries then see exactly are here too."""

    @property
    def words(self) -> str:
        """For a person."""
        return f"{self.pages} pages and the exact rows of {self.exact}"


NOTHING_HELD: Final = HeldKv()
