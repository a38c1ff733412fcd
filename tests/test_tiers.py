"""The quick cases of a grid cover every pair of its values, and are as few as that needs."""

from __future__ import annotations

import itertools
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.defaults import DEFAULT_CODEC
from tests.kinds import kind_of
from tests.tiers import Slice, Value, cover, values


@dataclass(frozen=True)
class Shape:
    size: int
    bits: tuple[int, int]


@given(
    st.lists(
        st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.sampled_from("xyz"), "c": st.booleans()}), max_size=30
    )
)
def test_every_pair_is_covered(cases: list[dict[str, Any]]) -> None:
    def pairs(chosen: Iterable[dict[str, Any]]) -> set[tuple[Value, Value]]:
        return {pair for case in chosen for pair in itertools.product(values(case), values(case))}

    chosen = cover(cases)
    assert pairs(cases[index] for index in chosen) == pairs(cases)
    assert len(chosen) <= max(1, len(pairs(cases)))


def test_a_product_takes_few_cases_more_than_its_two_largest_factors_have_pairs() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(3), range(5), range(2))]
    assert 15 <= len(cover(cases)) <= 18


def test_every_value_takes_as_many_cases_as_the_largest_factor_and_spreads_the_others() -> None:
    cases = [{"a": a, "b": b} for a, b in itertools.product(range(3), range(12))]
    chosen = [cases[index] for index in cover(cases, together=1)]
    assert sorted(case["b"] for case in chosen) == list(range(12))
    assert Counter(case["a"] for case in chosen) == {0: 4, 1: 4, 2: 4}


def test_one_parameter_keeps_all_its_values() -> None:
    assert cover([{"a": 1}, {"a": 2}, {"a": 1}]) == {0, 1}


def test_fields_and_places_are_parameters_of_their_own() -> None:
    case = {"shape": Shape(3, (2, 4)), "name": "n"}
    assert set(values(case)) == {("shape.size", "3"), ("shape.bits[0]", "2"), ("shape.bits[1]", "4"), ("name", "'n'")}


def test_a_test_without_parameters_stays() -> None:
    assert cover([{}]) == {0}


def test_values_of_a_kind_count_as_one() -> None:
    cases = [{"a": a, "b": b} for a, b in itertools.product(range(6), "xy")]

    def parity(value: object) -> object:
        return value % 2 if isinstance(value, int) else value

    chosen = [cases[index] for index in cover(cases, kind_of=parity)]
    assert len(chosen) == 4
    assert {(parity(case["a"]), case["b"]) for case in chosen} == set(itertools.product((0, 1), "xy"))


def test_codecs_of_a_kind_differ_in_nothing_but_bits() -> None:
    assert kind_of("kivi-4") == kind_of("kivi-2") != kind_of("fp16")
    assert kind_of("rot-k4v4") != kind_of("rot-k4v4-window"), "a window"
    assert kind_of("hack") != kind_of("hack-paper"), "an own page that rests as codes"
    assert kind_of("snapkv") != kind_of("mpcache"), "a selection of pages"
    assert kind_of(DEFAULT_CODEC) == DEFAULT_CODEC
    assert kind_of("grpc") == "grpc"


@given(st.lists(st.text(), unique=True), st.integers(1, 9))
def test_every_test_is_in_one_slice(tests: list[str], count: int) -> None:
    slices = [Slice.parse(f"{number}/{count}") for number in range(1, count + 1)]
    assert all(sum(part.holds(test) for part in slices) == 1 for test in tests)


@pytest.mark.parametrize("wrong", ["0/3", "4/3", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_a_slice_that_does_not_exist_is_refused(wrong: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not K/N"):
        Slice.parse(wrong)
