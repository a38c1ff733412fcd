"""Planes are coded if that pays. Tests turn the clock by which the choice is made. Bytes are right in either case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hackkv.wire_choice import FIRST_BYTES, PROBE_EVERY, ChosenForm, CodingCosts, Rate
from hackkv.wire_form import Bytes
from hackkv.zstd_form import create

PLANE = 8 << 10


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Timed:
    """`zstd` that takes `seconds_per_byte` on the clock."""

    def __init__(self, clock: Clock, seconds_per_byte: float) -> None:
        self._form, self._clock, self.seconds_per_byte = create(), clock, seconds_per_byte
        self.name, self.method = self._form.name, self._form.method

    def cap(self, raw_bytes: int) -> int:
        return self._form.cap(raw_bytes)

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        self._clock.seconds += plane.size * self.seconds_per_byte
        return self._form.encode(plane, itemsize, shape)

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        self._form.decode(coded, plane, itemsize)


@cache
def plane_of_nibbles(seed: int) -> Bytes:
    """Bytes that zstd shrinks by half."""
    return np.random.default_rng(seed).integers(0, 16, PLANE).astype(np.uint8)


def link_of(bytes_per_s: float) -> Rate:
    link = Rate()
    link.add(bytes_per_s, 1.0)
    return link


def coded(form: ChosenForm, planes: int) -> list[bool]:
    """Whether each of `planes` planes is coded. Checks that coded planes decode to the same bytes."""
    found = []
    for seed in range(planes):
        plane, back = plane_of_nibbles(seed % 4), np.empty(PLANE, dtype=np.uint8)
        made = form.encode(plane, 1)
        if made is not None:
            form.decode(memoryview(made), back, 1)
            assert np.array_equal(back, plane)
        found.append(made is not None)
    return found


@given(nanoseconds=st.floats(0.1, 100.0), megabytes_per_s=st.floats(1.0, 10000.0))
def test_it_codes_where_coding_both_ways_takes_less_than_the_link_would(
    nanoseconds: float, megabytes_per_s: float
) -> None:
    clock = Clock()
    form = ChosenForm(CodingCosts(Timed(clock, nanoseconds * 1e-9), clock), link_of(megabytes_per_s * 1e6))
    plane = plane_of_nibbles(0)
    saved = 1 - len(create().encode(plane, 1) or plane) / PLANE
    saves, takes = saved / (megabytes_per_s * 1e6), 2 * nanoseconds * 1e-9
    found, tries = coded(form, FIRST_BYTES // PLANE + 8), FIRST_BYTES // PLANE
    assert all(found[:tries])  # to measure the coder
    if abs(saves - takes) > 0.02 * takes:  # planes differ by a little
        assert found[tries:] == [saves > takes] * 8


def test_nothing_is_coded_for_a_link_that_is_not_measured() -> None:
    clock = Clock()
    assert (
        coded(ChosenForm(CodingCosts(Timed(clock, 1e-12), clock), Rate()), 2 * PROBE_EVERY) == [False] * 2 * PROBE_EVERY
    )


def test_a_coder_that_becomes_fast_is_found_out() -> None:
    """A node that was busy when it measured does not send raw for ever."""
    clock = Clock()
    timed = Timed(clock, 5e-8)
    form = ChosenForm(CodingCosts(timed, clock), link_of(20e6))
    assert sum(coded(form, 3 * PROBE_EVERY)) <= FIRST_BYTES // PLANE + 3
    timed.seconds_per_byte = 1e-12
    coded(form, 40 * PROBE_EVERY)
    assert all(coded(form, 8))


def test_beside_a_link_that_is_far_too_fast_nothing_is_coded_any_more() -> None:
    clock = Clock()
    form = ChosenForm(CodingCosts(Timed(clock, 1e-8), clock), link_of(1e10))
    coded(form, FIRST_BYTES // PLANE + 1)
    assert not any(coded(form, 8 * PROBE_EVERY))


def test_a_link_that_becomes_fast_turns_coding_off() -> None:
    clock = Clock()
    link = link_of(5e6)
    form = ChosenForm(CodingCosts(Timed(clock, 2e-9), clock), link)
    assert all(coded(form, 8))
    for _ in range(6):
        link.add(1e10, 1.0)
    assert not any(coded(form, 8))


def test_older_measurements_of_a_rate_count_less() -> None:
    rate = Rate()
    assert (rate.known, rate.seconds_per_unit) == (False, 0.0)
    rate.add(100.0, 1.0)
    rate.add(100.0, 4.0)
    assert rate.known
    assert rate.seconds_per_unit == (0.5 + 4.0) / 150.0
