"""Work in separate processes, so that a kernel that breaks its GPU context, dies or never ends harms no other."""

from __future__ import annotations

import faulthandler
import math
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic

import torch
from hack_kernels import load
from hack_kernels.triton.backend import TritonBackend

STOP_S = 10
"""Seconds to wait for a killed process: the driver first ends the work that the process had begun."""


@dataclass(frozen=True, slots=True)
class Task:
    """A name and a function of the kernels, which returns a result or raises. Both can be sent to a process."""

    name: str
    run: Callable[[TritonBackend], object]
    seed: int = 0
    """Seed of torch's random numbers. The same seed gives the same inputs, in whatever order tasks run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task, or the reason of its failure. The last line of `failure` sums it up."""

    name: str
    result: object = None
    failure: str = ""


def answers(tasks: Iterable[Task], processes: int, until: float, limit_s: float = math.inf) -> Iterator[Answer]:
    """Do tasks in up to `processes` processes. Yields answers as they come.

    When `monotonic` reaches `until`, everything ends, and tasks without an answer get none. A task that takes longer
    than `limit_s` fails. A process whose task failed is not used again.
    """
    waiting = deque(tasks)
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while (waiting or busy) and monotonic() < until:
            while waiting and len(busy) < processes:
                worker = idle.pop() if idle else _Worker()
                worker.begin(waiting.popleft(), limit_s)
                busy[worker.pipe] = worker
            soonest = min(until, *(worker.ends for worker in busy.values()))
            wait(list(busy), None if soonest == math.inf else max(0.0, soonest - monotonic()))
            for worker in list(busy.values()):
                answer = worker.answer()
                if answer is None:
                    continue
                del busy[worker.pipe]
                if answer.failure:
                    worker.stop()
                else:
                    idle.append(worker)
                yield answer
    finally:
        for worker in (*idle, *busy.values()):
            worker.stop()


class _Worker:
    """A process that does one task after another."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, task: Task, limit_s: float) -> None:
        """Send a task."""
        self._name, self._limit_s = task.name, limit_s
        self.ends = monotonic() + limit_s
        self.pipe.send(task)

    def answer(self) -> Answer | None:
        """The task's answer; None while the task goes on."""
        if self.pipe.poll():
            try:
                answer: Answer = self.pipe.recv()
            except (EOFError, OSError):
                self._process.join(STOP_S)
                return Answer(self._name, failure=f"its process died, exit code {self._process.exitcode}")
            return answer
        if monotonic() >= self.ends:
            return Answer(self._name, failure=f"no end within {self._limit_s:.0f} s")
        return None

    def stop(self) -> None:
        """Kill the process, whatever it does."""
        self._process.kill()
        self._process.join(STOP_S)
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(_attempt(task))


def _attempt(task: Task) -> Answer:
    try:
        torch.manual_seed(task.seed)
        backend = load("triton")
        assert isinstance(backend, TritonBackend)
        result = task.run(backend)
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)
            torch.cuda.empty_cache()
    except Exception:  # noqa: BLE001  any error of one kernel is an answer
        return Answer(task.name, failure=traceback.format_exc())
    return Answer(task.name, result)
