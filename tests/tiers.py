"""Chooses the tests that `make test` leaves to `make test-all`: those with the marker `slow`.

A test is slow if it computes for another machine than this one (Triton interpreted, or compiled for GPUs), drives a
browser, runs for a long time by intention (soaks, storms, queueing theory), measures (benches, plans, tables of
accuracy), or breaks a cluster of processes in a way that a quick test breaks nodes of one process.

If Triton interprets a test, only its first case is quick. If a test has the marker `grid`, a small set of cases that
covers every pair of values of two parameters is quick; with `grid(together=1)`, a small set that covers every value. So
no backend, instruction set, wire or codec is left out. With `grid(kinds=True)` codecs of one kind (tests/kinds.py)
count as one value. That is for tests of nodes and clusters, to which codecs of a kind are alike. Bytes and kernels of
every codec have quick tests of their own (tests/codecs).

`--slice K/N` runs one of N parts of the chosen tests. CI has time for a part of the slow ones, and takes another part
for each commit.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations_with_replacement
from typing import Any
from zlib import crc32

import pytest

Value = tuple[str, str]
"""Name and value of a parameter."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One of `count` parts of all tests, with a number from 1 on. A test is in one of them, always the same."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """K/N. Raises `ArgumentTypeError`."""
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if found is None or int(found[1]) > int(found[2]):
            raise ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
        return cls(int(found[1]), int(found[2]))

    def holds(self, nodeid: str) -> bool:
        """Whether a test is in this part."""
        return crc32(nodeid.encode()) % self.count == self.number - 1


def thin_out(items: Iterable[pytest.Item], kind_of: Callable[[object], object]) -> None:
    """Mark those cases of each test slow that `cover` does not choose. `kind_of` gives a value's kind.

    Cases that are slow already, or skipped on this machine, cover nothing and stay unchanged.
    """
    for cases in _by_test(item for item in items if not {"skip", "slow"} & {mark.name for mark in item.iter_markers()}):
        marker = cases[0].get_closest_marker("grid")
        together = marker.kwargs.get("together", 2) if marker else 2
        params = [case.callspec.params if hasattr(case, "callspec") else {} for case in cases]
        quick = cover(params, together, kind_of) if marker and marker.kwargs.get("kinds") else cover(params, together)
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


def cover(
    cases: Sequence[Mapping[str, Any]], together: int = 2, kind_of: Callable[[object], object] = lambda value: value
) -> set[int]:
    """Indices of a few cases that together have every pair of values that any case has; with `together` 1, every value.

    Values of one kind (`kind_of`) count as one. The case with the most new pairs or values is chosen next; of equals,
    the one whose values have been chosen least, then the earlier one. So the choice is always the same, and no value
    dominates it.
    """
    each = [frozenset(values(case, kind_of)) for case in cases]
    present = [set(combinations_with_replacement(sorted(case), together)) for case in each]
    missing, chosen = set[tuple[Value, ...]]().union(*present), {0} if len(cases) == 1 else set[int]()
    uses = Counter[Value]()
    while missing:
        gains = [len(new & missing) for new in present]
        most = max(gains)
        best = min(
            (index for index, gain in enumerate(gains) if gain == most),
            key=lambda index: sum(uses[value] for value in each[index]),
        )
        chosen.add(best)
        missing -= present[best]
        uses.update(each[best])
    return chosen


def values(case: Mapping[str, Any], kind_of: Callable[[object], object] = lambda value: value) -> Iterator[Value]:
    """The parameters of a case with their values. Fields of a dataclass and places in a tuple are parameters too."""
    for name, value in case.items():
        if is_dataclass(value):
            yield from values({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}, kind_of)
        elif isinstance(value, tuple):
            yield from values({f"{name}[{index}]": each for index, each in enumerate(value)}, kind_of)
        else:
            yield name, repr(kind_of(value))
