"""Guesses which name was meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def did_you_mean(name: str, known: Collection[str], section: str = "") -> str:
    """`; did you mean SECTION.X?` with the most similar of the `known` names, or nothing if none resembles `name`."""
    nearest = get_close_matches(name, known, n=1)
    prefix = f"{section}." if section else ""
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
