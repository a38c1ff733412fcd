"""A task that gives way lets others run while they have work, but not for ever."""

from __future__ import annotations

import asyncio

import pytest

from transport import slices
from transport.slices import IDLE_S, give_way


class Clock:
    """A clock that advances only with work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rounds", "given"),
    [(0, 1), (1, 2), (3, 4), (1000, 10)],
    ids=["nothing to do", "one round", "some rounds", "more than there is time for"],
)
async def test_others_run_until_they_are_idle_or_their_time_is_up(
    monkeypatch: pytest.MonkeyPatch, rounds: int, given: int
) -> None:
    clock, ran = Clock(), 0
    monkeypatch.setattr(slices, "perf_counter", clock)

    async def others() -> None:
        nonlocal ran
        while True:
            if ran < rounds:
                clock.now += 2 * IDLE_S
            ran += 1
            await asyncio.sleep(0)

    busy = asyncio.create_task(others())
    await give_way(19 * IDLE_S)
    busy.cancel()
    assert ran == given
