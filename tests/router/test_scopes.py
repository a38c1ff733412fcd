"""Work that is given up when an alarm goes off."""

from __future__ import annotations

import asyncio

import pytest

from hackkv.errors import NodeLost, Overloaded
from router.scopes import Alarm, guarded


async def forever() -> None:
    await asyncio.Event().wait()


async def one() -> int:
    await asyncio.sleep(0)
    return 1


async def test_work_that_ends_is_not_disturbed_by_an_alarm_after_it() -> None:
    alarm = Alarm()
    assert await guarded(one(), alarm) == 1
    alarm.ring(NodeLost("late"))
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(NodeLost, match="late"):  # and no work begins after it
        await guarded(one(), Alarm(), alarm)


async def test_an_alarm_ends_the_work_of_all_who_heed_it() -> None:
    alarm, other = Alarm(), Alarm()
    tasks = [asyncio.create_task(guarded(forever(), other, alarm)) for _ in range(3)]
    await asyncio.sleep(0)
    error = NodeLost("gone")
    alarm.ring(error)
    other.ring(Overloaded("later"))  # both have rung when the tasks hear of it: the first alarm that they name counts
    for task in tasks:
        with pytest.raises(Overloaded):
            await task
        assert task.cancelling() == 0
    assert alarm.result() is error


async def test_what_is_ready_when_the_alarm_goes_off_counts() -> None:
    alarm, news = Alarm(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(guarded(asyncio.wait_for(news, 60), alarm))
    await asyncio.sleep(0)
    alarm.ring(NodeLost("gone"))
    news.set_result("the last word")
    assert await task == "the last word"


async def test_a_cancelled_task_stays_cancelled_though_an_alarm_goes_off_too() -> None:
    alarm = Alarm()
    task = asyncio.create_task(guarded(forever(), alarm))
    await asyncio.sleep(0)
    alarm.ring(NodeLost("gone"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_of_the_work_come_through_and_leave_no_cancellation_behind() -> None:
    alarm, caught = Alarm(), list[int]()

    async def stubborn() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise Overloaded("instead") from None

    async def run() -> None:
        with pytest.raises(Overloaded):
            await guarded(stubborn(), alarm)
        task = asyncio.current_task()
        assert task is not None
        caught.append(task.cancelling())

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    alarm.ring(NodeLost("gone"))
    await running
    assert caught == [0]
