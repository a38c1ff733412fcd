"""The longest turns of an event loop: `python -m bench.router.turns FILE MODULE ARGUMENT...` runs a module, timed.

A turn is one call of the loop; other work runs after it. When the module ends, FILE gets the longest turns: what ran,
and the most processor time that it took. Processor time is a fair measure on a busy machine too. SIGUSR1 makes the
process forget the turns so far, such as those of the start.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from inspect import iscoroutine
from pathlib import Path
from time import thread_time
from typing import Any, Final

FORGET: Final = signal.SIGUSR1
KEPT: Final = 8
"""Number of turns that are reported for each process."""


class Longest:
    """Name -> the most processor time, in seconds, of a turn in which it ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """`Handle._run`, timed."""

        def timed(handle: Any) -> None:
            name, began = what_runs(handle._callback), thread_time()
            try:
                run(handle)
            finally:
                took = thread_time() - began
                if took > self.seconds.get(name, 0.0):
                    self.seconds[name] = took

        return timed

    def write(self, file: Path, process: int) -> None:
        """Write the longest turns as JSON, longest first. Only process `process` writes, not its forks."""
        if os.getpid() != process:
            return
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])[:KEPT]
        file.write_text(json.dumps(dict(longest)), encoding="utf-8")


def what_runs(callback: object) -> str:
    """A callback's name. For a task: the names of its coroutine and of the innermost coroutine that it awaits."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return name_of(callback)
    outer = inner = task.get_coro()
    while iscoroutine(awaited := getattr(inner, "cr_await", None)):
        inner = awaited
    names = [name_of(each) for each in (outer, inner)]
    return names[0] if outer is inner else " > ".join(names)


def name_of(thing: object) -> str:
    """The qualified name of `thing`, or of its type."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def told(folder: Path) -> dict[str, dict[str, float]]:
    """Name of a file -> what its process wrote."""
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.iterdir())}


def turns_table(turns: Mapping[str, Mapping[str, float]]) -> str:
    """The table of processes and their turns, in Markdown."""
    rows = [
        f"| {process} | `{name}` | {1000 * seconds:.1f} |" for process, longest in turns.items()
        for name, seconds in longest.items()
    ]  # fmt: skip
    return "\n".join(
        (
            f"The {KEPT} longest turns of each event loop, in processor time: the most that each took. `a > b` is a "
            "task of a that goes on in b.",
            "",
            "| process | what ran | ms |",
            "|---|---|---|",
            *rows,
        )
    )


def main(arguments: list[str]) -> None:
    """Run a module as `python -m` does."""
    file, module, *rest = arguments
    longest, own = Longest(), os.getpid()
    handle: Any = asyncio.Handle
    handle._run = longest.timed(handle._run)
    atexit.register(longest.write, Path(file), own)
    signal.signal(FORGET, lambda *_: longest.seconds.clear())
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
