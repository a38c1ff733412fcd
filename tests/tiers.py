"""What `make test` leaves to `make test-all`: tests with the marker `slow`.

A test is slow where it computes for another machine than this one (Triton interpreted, or compiled for GPUs), drives a
browser, or runs for a long time by intention (soaks, storms). Of what Triton interprets the first case of each test is
quick. Of a test with the marker `grid` as few cases are quick as have every pair of values of two parameters. So a
backend, an instruction set, a wire or a codec is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations_with_replacement
from typing import Any

import pytest

Value = tuple[str, str]
"""Name of a parameter, and a value of it."""


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test slow that add no pair of values to those before."""
    for cases in _by_test(items):
        quick = cover([case.callspec.params if hasattr(case, "callspec") else {} for case in cases])
        for index, case in enumerate(cases):
            if index not in quick:
                case.add_marker(pytest.mark.slow)


def keep_first(items: Iterable[pytest.Item]) -> None:
    """Mark all cases of each test slow but the first."""
    for cases in _by_test(items):
        for case in cases[1:]:
            case.add_marker(pytest.mark.slow)


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Function]]:
    tests = dict[str, list[pytest.Function]]()
    for item in items:
        if isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def cover(cases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Indices of few cases which together have every value, and every pair of values, that any case has.

    The case with most new pairs goes first, of equals the earlier one, so the choice is the same every time.
    """
    present = [set(combinations_with_replacement(sorted(values(case)), 2)) for case in cases]
    missing, chosen = set[tuple[Value, Value]]().union(*present), {0} if len(cases) == 1 else set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(present[index] & missing))
        chosen.add(best)
        missing -= present[best]
    return chosen


def values(case: Mapping[str, Any]) -> Iterator[Value]:
    """Parameters of a case and what they are; fields of a dataclass and places in a tuple are parameters too."""
    for name, value in case.items():
        if is_dataclass(value):
            yield from values({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        elif isinstance(value, tuple):
            yield from values({f"{name}[{index}]": each for index, each in enumerate(value)})
        else:
            yield name, repr(value)
