"""Clients share places, large jobs leave a place to small ones, and nothing is left when all jobs have gone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.errors import Overloaded
from router.api.buffered import BodyBudget
from router.api.fair_line import LARGE, FairLine


class Work:
    """Jobs that stay until they are told to end, and the order in which they began."""

    def __init__(self, line: FairLine) -> None:
        self.line, self.begun = line, list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, name: str, cost: int = 1, client: str = "") -> None:
        """A job stands in line. Its client is its first letter."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._do(name, cost, client or name[0]))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        """A job ends, and the next one begins."""
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        """A job is given up."""
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])
        await asyncio.sleep(0)

    async def _do(self, name: str, cost: int, client: str) -> None:
        async with self.line.place(client, cost):
            self.begun.append(name)
            await self._ends[name].wait()


async def test_one_client_with_many_jobs_is_one_client() -> None:
    work = Work(FairLine(1, 100))
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        await work.come(name)
    for _ in range(6):
        await work.end(work.begun[-1])
    assert work.begun == ["a1", "b1", "a2", "b2", "a3", "a4"]


async def test_jobs_count_by_what_they_cost() -> None:
    work = Work(FairLine(1, 100))
    for name, cost in (("a1", 50), ("a2", 50), ("b1", 10), ("b2", 10), ("b3", 10)):
        await work.come(name, cost)
    for _ in range(5):
        await work.end(work.begun[-1])
    assert work.begun == ["a1", "b1", "b2", "b3", "a2"]


async def test_large_jobs_leave_a_place_to_small_ones() -> None:
    work = Work(FairLine(2, 100))
    for name, cost in (("a1", LARGE), ("a2", LARGE), ("b1", LARGE), ("b2", 1)):
        await work.come(name, cost)
    assert work.begun == ["a1", "b2"]
    await work.end("a1")
    assert work.begun == ["a1", "b2", "b1"]
    alone = Work(FairLine(1, 100))
    await alone.come("a1", LARGE)
    assert alone.begun == ["a1"]


async def test_who_leaves_takes_nothing_along() -> None:
    line = FairLine(1, 100)
    work = Work(line)
    for name in ("a1", "a2", "b1"):
        await work.come(name)
    await work.leave("b1")
    await work.leave("a1")
    assert work.begun == ["a1", "a2"]
    await work.end("a2")
    await work.come("c1")
    assert work.begun[-1] == "c1"
    assert line.waiting == 0


async def test_the_line_is_bounded_and_no_client_fills_it() -> None:
    work = Work(FairLine(1, 4))
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        await work.come(name)
    for name in ("a4", "c1"):
        with pytest.raises(Overloaded):
            await work.tasks[name]
    assert not any(work.tasks[name].done() for name in ("a1", "a2", "a3", "b1", "b2"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1, 9, LARGE]), st.booleans()), max_size=20))
async def test_everybody_is_served_whatever_comes_and_goes(jobs: list[tuple[str, int, bool]]) -> None:
    work = Work(FairLine(2, 100))
    for at, (client, cost, leaves) in enumerate(jobs):
        await work.come(f"{client}{at}", cost)
        if leaves:
            await work.leave(f"{client}{at}")
    ended = 0
    while ended < len(work.begun):
        if not work.tasks[work.begun[ended]].done():
            await work.end(work.begun[ended])
        ended += 1
    stayed = {f"{client}{at}" for at, (client, _, leaves) in enumerate(jobs) if not leaves}
    assert stayed <= set(work.begun)
    assert work.line.waiting == 0


def test_bodies_share_one_budget() -> None:
    budget = BodyBudget(100, 10)
    with budget.account("a") as mine, budget.account("a") as also_mine, budget.account("b") as other:
        mine(30)
        also_mine(20)
        with pytest.raises(Overloaded):
            mine(1)
        other(50)
        assert budget.held == 100
        with budget.account("c") as late, pytest.raises(Overloaded):
            late(1)
    assert budget.held == 0


def test_a_small_budget_still_holds_the_largest_body() -> None:
    with BodyBudget(1, 10).account("a") as claim:
        claim(10)
