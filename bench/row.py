"""One line of a table of measured speeds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `ms` are medians by contender; `ratios` say how many times faster `hack` is."""

    what: str
    shape: str
    ms: dict[str, float]
    ratios: dict[str, float] = field(default_factory=dict)
    gb_per_s: float | None = None
    of_read_bandwidth: float | None = None
    of_integer_dots: float | None = None
    """Share of the products that the same threads reach in a bare loop of integer dots."""
    speeds: dict[str, float] = field(default_factory=dict)
    """GB/s of every contender, if they move different bytes."""
