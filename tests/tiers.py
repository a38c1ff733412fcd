"""What `make test` leaves to `make test-all`: tests with the marker `slow`.

A test is slow where it computes for another machine than this one (Triton interpreted, or compiled for GPUs), drives a
browser, or runs for a long time by intention (soaks, storms). Of the cases that Triton interprets some stay quick: as
few as have every value of every parameter. A backend, an instruction set or a codec is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test slow that add no value to those before."""
    tests = dict[str, list[pytest.Function]]()
    for item in items:
        if isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        quick = cover([case.callspec.params if hasattr(case, "callspec") else {} for case in cases])
        for index, case in enumerate(cases):
            if index not in quick:
                case.add_marker(pytest.mark.slow)


def cover(cases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Indices of few cases which together have every value that any case has.

    The case with most new values goes first, of equals the earlier one, so the choice is the same every time.
    """
    present = [set(values(case)) for case in cases]
    missing, chosen = set[tuple[str, str]]().union(*present), {0} if len(cases) == 1 else set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(present[index] & missing))
        chosen.add(best)
        missing -= present[best]
    return chosen


def values(case: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Parameters of a case and what they are; fields of a dataclass and places in a tuple are parameters too."""
    for name, value in case.items():
        if is_dataclass(value):
            yield from values({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        elif isinstance(value, tuple):
            yield from values({f"{name}[{index}]": each for index, each in enumerate(value)})
        else:
            yield name, repr(value)
