"""Signals that end a role: SIGTERM drains; a second SIGTERM and everything else stop at once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from hackkv.config import RoleConfig
from node.process import Shutdown, run_role

TIMEOUT_S = 60.0


def test_the_first_request_drains_and_the_second_stops() -> None:
    shutdown = Shutdown()
    shutdown.ask()
    assert (shutdown.drain.is_set(), shutdown.stop.is_set()) == (True, False)
    shutdown.ask()
    assert shutdown.stop.is_set()


def test_an_order_to_stop_also_says_that_nothing_new_is_wanted() -> None:
    shutdown = Shutdown()
    shutdown.order()
    assert shutdown.drain.is_set()
    assert shutdown.stop.is_set()


async def test_a_role_stops_when_it_has_drained() -> None:
    shutdown, drained = Shutdown(), asyncio.Event()

    async def drain() -> None:
        drained.set()

    async with asyncio.timeout(TIMEOUT_S), shutdown.draining(drain):
        shutdown.ask()
        await shutdown.stop.wait()
    assert drained.is_set()


async def test_an_order_to_stop_ends_a_drain_that_takes_long() -> None:
    shutdown, began, ended = Shutdown(), asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(TIMEOUT_S), shutdown.draining(drain):
        shutdown.ask()
        await began.wait()
        shutdown.ask()
        await shutdown.stop.wait()
    assert ended.is_set()


async def test_a_drain_that_fails_is_heard_of() -> None:
    async def drain() -> None:
        raise RuntimeError("the disk is full")

    async def serve() -> None:
        shutdown = Shutdown()
        async with asyncio.timeout(TIMEOUT_S), shutdown.draining(drain):
            shutdown.ask()
            await shutdown.stop.wait()

    with pytest.raises(RuntimeError, match="the disk is full"):
        await serve()


@pytest.mark.parametrize(
    ("signals", "events"),
    [
        ((signal.SIGTERM,), ["drain"]),
        ((signal.SIGTERM, signal.SIGTERM), ["drain", "stop"]),
        ((signal.SIGINT,), ["drain", "stop"]),
    ],
)
def test_signals_reach_the_role(signals: tuple[signal.Signals, ...], events: list[str]) -> None:
    """The test sends real signals to this process, one after another."""
    seen: list[str] = []

    async def serve(_: RoleConfig, shutdown: Shutdown) -> None:
        for signum in signals:
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(shutdown.drain.wait(), TIMEOUT_S)
        if "stop" in events:
            await asyncio.wait_for(shutdown.stop.wait(), TIMEOUT_S)
        seen.extend(name for name in ("drain", "stop") if getattr(shutdown, name).is_set())

    assert run_role("test", RoleConfig, serve, []) == 0
    assert seen == events
