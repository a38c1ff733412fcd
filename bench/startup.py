"""`python -m bench.startup [MODEL] [--repeat N] [--cold]`: how long a person waits for `hackkv`, and for its end.

The table has wall seconds, best and median of N: of `hackkv --version`, of `hackkv --help`, of `hackkv serve MODEL`
until its address is printed (then every node is registered), and from Ctrl-C, at a random moment of the start, to the
end of all processes. Processor seconds are shown too: they are the time that a quiet machine would take. With --cold
every start has an empty cache, so that the canary measures the codec's cost, and a GGUF file is converted.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

TIMEOUT_S: Final = 300.0
INTERRUPTED: Final = 130
HACKKV: Final = str(Path(sys.executable).with_name("hackkv"))
TARGETS: Final = {"--version": 0.3, "--help": 0.3, "": 4.0, "smollm2": 6.0}
"""Option or model -> target in seconds on two quiet cores."""


@dataclass(frozen=True, slots=True)
class Took:
    """One measurement, in seconds."""

    wall: float
    cpu: float
    """Seconds of processor time of all processes that ended during the measurement."""


def timed(work: Callable[[], float]) -> Took:
    """Measure `work`, which returns its wall seconds."""
    before = _cpu()
    wall = work()
    return Took(wall, _cpu() - before)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(option: str) -> float:
    """Seconds of `hackkv OPTION`."""
    began = perf_counter()
    subprocess.run([HACKKV, option], stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT_S)
    return perf_counter() - began


def ready(model: str, environment: dict[str, str]) -> float:
    """Seconds until `hackkv serve MODEL` serves. It is stopped after that."""
    began = perf_counter()
    with _serve(model, environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = perf_counter() - began
        process.send_signal(signal.SIGINT)
        code = process.wait(TIMEOUT_S)
    if not line or code != INTERRUPTED:
        raise RuntimeError(f"hackkv serve {model} ended with exit code {code}")
    return took


def interrupted(model: str, environment: dict[str, str], after_s: float) -> float:
    """Seconds from Ctrl-C, `after_s` seconds after the start, to the end of the last process."""
    with _serve(model, environment) as process:
        try:
            code = process.wait(after_s)
        except subprocess.TimeoutExpired:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        else:
            raise RuntimeError(f"hackkv serve {model} ended before Ctrl-C, with exit code {code}")
        began = perf_counter()
        process.send_signal(signal.SIGINT)
        code = process.wait(TIMEOUT_S)
        _, left = psutil.wait_procs(family[1:], TIMEOUT_S)
    if left or code != INTERRUPTED:
        raise RuntimeError(f"Ctrl-C after {after_s:.2f} s: exit code {code}, still running: {left}")
    return perf_counter() - began


def _serve(model: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [HACKKV, "serve", model, "--port", "0"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="How long a person waits for hackkv to start, and to end.")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="an empty cache for every start")
    options = parser.parse_args()
    table = Table("what", title=f"start-up; load average {os.getloadavg()[0]:.1f}", title_justify="left")
    for column in ("best, s", "median, s", "cpu, s", "target, s"):
        table.add_column(column, justify="right")

    def row(name: str, took: list[Took], target: float | None) -> None:
        walls = [each.wall for each in took]
        cpu = statistics.median(each.cpu for each in took)
        goal = "" if target is None else f"{target:g}"
        table.add_row(name, f"{min(walls):.2f}", f"{statistics.median(walls):.2f}", f"{cpu:.2f}", goal)

    for option in ("--version", "--help"):
        took = [timed(partial(told, option)) for _ in range(options.repeat)]
        row(f"hackkv {option}", took, TARGETS[option])
    starts = []
    for _ in range(options.repeat):
        with TemporaryDirectory() as cache:
            environment = {"XDG_CACHE_HOME": cache} if options.cold else {}
            starts.append(timed(partial(ready, options.model, environment)))
    kind = "cold" if options.cold else "cached"
    row(f"hackkv serve {options.model} ({kind})", starts, None if options.cold else TARGETS.get(options.model))
    longest = max(each.wall for each in starts)
    moments = [random.uniform(0.2, longest) for _ in range(options.repeat)]
    row("from Ctrl-C to the end", [timed(partial(interrupted, options.model, {}, at)) for at in moments], None)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
