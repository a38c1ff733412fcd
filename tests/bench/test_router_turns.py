"""The longest turns of event loops: each has a name, and a program reports its turns when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.router.cluster import running
from bench.router.streams import Times, anew, stream
from bench.router.turns import Longest, told, turns_table, what_runs
from hackkv.packaged import SHIPPED

PROGRAM = """
import asyncio, os, signal

async def early():
    pass

async def late():
    raise SystemExit(3)

asyncio.run(early())
os.kill(os.getpid(), signal.SIGUSR1)
asyncio.run(late())
"""


async def test_a_turn_is_named_by_its_task_and_by_what_goes_on_in_it() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    def callback() -> None:
        """Nothing."""

    task = asyncio.create_task(outer())
    step = task.cancel  # bound to the task, as its steps are
    here = test_a_turn_is_named_by_its_task_and_by_what_goes_on_in_it.__qualname__ + ".<locals>."
    assert what_runs(callback) == f"{here}callback"
    assert what_runs(step) == f"{here}outer"
    await asyncio.sleep(0)  # its turn
    assert what_runs(step) == f"{here}outer > Event.wait"
    task.cancel()


def test_the_longest_turn_of_each_kind_is_kept(tmp_path: Path) -> None:
    longest = Longest()
    longest.seconds = {str(n): n / 1000 for n in range(20)}
    longest.write(tmp_path / "child", os.getpid() + 1)
    longest.write(tmp_path / "router", os.getpid())
    kept = told(tmp_path)
    assert list(kept) == ["router"]
    assert list(kept["router"]) == [str(n) for n in range(19, 11, -1)]
    assert "| router | `19` | 19.0 |" in turns_table(kept)


def test_a_program_that_fails_tells_its_turns_since_it_was_told_to_forget(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "bench.router.turns", str(tmp_path / "out"), "prog"]
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(command, env={"PYTHONPATH": f"{root}:{tmp_path}"}, cwd=root, timeout=60, check=False)
    assert ended.returncode == 3
    names = json.loads((tmp_path / "out").read_text())
    assert "late" in names
    assert "early" not in names


@pytest.mark.slow
async def test_router_and_nodes_are_timed(tmp_path: Path) -> None:
    times = Times()
    async with running(SHIPPED, 1, tmp_path) as cluster:
        await stream(anew(cluster.url), 5, 0, times)
    assert times.failures == []
    assert set(told(tmp_path)) == {"router", "decode node", "prefill node"}
    assert all(seconds > 0 for turns in told(tmp_path).values() for seconds in turns.values())
