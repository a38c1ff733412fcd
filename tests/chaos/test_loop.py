"""The virtual clock: waiting costs nothing, the seed determines the order, and a deadlock is found at once."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from chaos.loop import Deadlock, run


def test_a_day_takes_no_time() -> None:
    async def day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began = monotonic()
    assert run(day()) == 86_400
    assert monotonic() - began < 60


def test_timers_fire_in_order() -> None:
    async def race() -> list[int]:
        finished: list[int] = []

        async def runner(seconds: int) -> None:
            await asyncio.sleep(seconds)
            finished.append(seconds)

        await asyncio.gather(*(runner(seconds) for seconds in (30, 10, 20)))
        return finished

    assert run(race()) == [10, 20, 30]


def test_deadlines_hold() -> None:
    async def late() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(6)

    with pytest.raises(TimeoutError):
        run(late())


def test_a_dead_end_is_found() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait_for_nobody())


def test_thread_work_takes_the_loops_time_and_its_errors_come_back() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(sum, (1, 2)) == 3
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        return loop.time()

    first, again, other = run(work(), seed=1), run(work(), seed=1), run(work(), seed=2)
    assert first == again != other
    assert first > 0
