"""What stays quick of a grid has every value of it, and no more cases than that takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import cover, values


@dataclass(frozen=True)
class Shape:
    size: int
    bits: tuple[int, int]


@given(
    st.lists(
        st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.sampled_from("xyz"), "c": st.booleans()}), max_size=30
    )
)
def test_every_value_is_covered_and_every_case_adds_one(cases: list[dict[str, Any]]) -> None:
    chosen = cover(cases)
    everything = {value for case in cases for value in values(case)}
    assert {value for index in chosen for value in values(cases[index])} == everything
    assert len(chosen) <= max(1, len(everything))


def test_a_product_takes_as_many_cases_as_its_largest_factor() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(3), range(5), range(2))]
    assert len(cover(cases)) == 5


def test_fields_and_places_are_parameters_of_their_own() -> None:
    case = {"shape": Shape(3, (2, 4)), "name": "n"}
    assert set(values(case)) == {("shape.size", "3"), ("shape.bits[0]", "2"), ("shape.bits[1]", "4"), ("name", "'n'")}


def test_a_test_without_parameters_stays() -> None:
    assert cover([{}]) == {0}
