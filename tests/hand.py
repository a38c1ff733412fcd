"""A clock for tests whose time does not pass by itself."""

from __future__ import annotations


class Hand:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.time = 17.0

    def __call__(self) -> float:
        return self.time
