"""`python -m bench.memory [MODEL] [--codec NAME] [--dtype NAME] [--weights W]`: memory of a cluster and of one process.

*PSS* is resident memory. A page that n processes map counts 1/n in each, so the sum over processes is the memory that
they take together. A file that other programs map too counts less here. So this process loads no library that it
measures, and says how many other processes map these files. *Anonymous* pages belong to no file, and do not depend on
what else runs. Two things are measured, one after the other, each after the same few requests:

- one process that loads the model and answers alone (`bench.alone`). It is measured after that, and again after it has
  given back freed memory and start-up code, as the processes of a cluster do, and has answered once more;
- `hackkv serve MODEL`, 2 prefill and 2 decode nodes: every node, the router, and the command itself.

This process runs once before, unmeasured. The first load on a machine converts the model and times products
(`hackkv/model/products.py`), which leaves memory in the heap. A later load reads the stored results.

Weights are the pages of a mapped safetensors file. A model in Hugging Face's form is copied at load. Then its weights
count as own memory, which the nodes of `hackkv serve` share, since they are forked from one process that loaded it.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from hackkv.defaults import DEFAULT_CODEC

REQUESTS: Final = 8
PROMPT: Final = 200
NEW_TOKENS: Final = 8
TIMEOUT_S: Final = 300.0
PAUSE_S: Final = 5.0
"""Seconds between the last answer and the measurement: idle processes give memory back."""
TARGET: Final = 1.6
SHARED: Final = ("libtorch_cpu.so", ".safetensors")
"""Endings of the names of the largest files. A process that maps the library maps its other files too."""


@dataclass(frozen=True, slots=True)
class Held:
    """PSS of one process, in bytes."""

    name: str
    total: int
    weights: int
    """Pages of safetensors files."""
    anonymous: int
    """Pages of no file."""

    @property
    def own(self) -> int:
        """Memory other than mapped weights: Python, torch, KV, copies of weights."""
        return self.total - self.weights


def held(name: str, pid: int) -> Held:
    """The memory of process `pid` now. Raises psutil's errors."""
    process = psutil.Process(pid)
    weights = sum(area.pss for area in process.memory_maps() if area.path.endswith(".safetensors"))
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (kibibytes,) = re.findall(r"^Pss_Anon: +(\d+) kB$", rollup, re.MULTILINE)
    return Held(name, process.memory_full_info().pss, weights, int(kibibytes) << 10)


def prompt(seed: int) -> list[int]:
    """A prompt that differs by request: requests with equal prompts would all go to the node that holds it."""
    return list(range(3 + seed, 3 + seed + PROMPT))


def alone(options: argparse.Namespace) -> list[Held]:
    """One process that loads the model and answers (`bench.alone`): before and after it gives memory back."""
    command = [sys.executable, "-m", "bench.alone", options.model, options.codec, options.dtype, options.weights]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    looks = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name in ("one process", "the same, memory given back"):
            if not process.stdout.readline():
                raise RuntimeError("the single process ended before it had answered")
            sleep(PAUSE_S)
            looks.append(held(name, process.pid))
            process.stdin.write("\n")
            process.stdin.flush()
    return looks


def cluster(options: argparse.Namespace) -> tuple[list[Held], int]:
    """The processes of `hackkv serve` after it answered the requests, and how many other processes map their files.

    The command itself comes first.
    """
    with _serving(options) as (process, url):
        name = _told(f"{url}/v1/models")["data"][0]["id"]
        for seed in range(REQUESTS):
            body = {"model": name, "prompt": prompt(seed), "max_tokens": NEW_TOKENS, "seed": seed, "ignore_eos": True}
            _told(f"{url}/v1/completions", body)
        sleep(PAUSE_S)
        children = psutil.Process(process.pid).children(recursive=True)
        many = [held("hackkv serve", process.pid), *(held(child.name(), child.pid) for child in children)]
        return many, strangers([process.pid, *(child.pid for child in children)])


def strangers(known: Iterable[int]) -> int:
    """How many processes other than `known` map a file of `SHARED` that the known ones map. Processes whose maps are
    not readable are left out. A copy in another environment or cache is another file."""
    mapped: dict[int, set[str]] = {}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
            mapped[int(maps.parent.name)] = {line.split(maxsplit=3)[3] for line in lines if line.endswith(SHARED)}
    ours = set[str]().union(*(mapped.pop(pid, set()) for pid in known))
    return sum(bool(files & ours) for files in mapped.values())


def _told(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The cluster's answer to GET, or to POST if there is a body. Raises `URLError`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [str(Path(sys.executable).with_name("hackkv")), "serve", options.model, "--port", "0"]
    command += ["--codec", f"{options.codec},allow_loss", "--dtype", f"{options.dtype},{options.weights}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^/ ]+", process.stdout.readline())
        if found is None:
            raise RuntimeError("hackkv serve ended before it was ready")
        yield process, found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="The memory of a cluster beside that of one process.")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--codec", default=DEFAULT_CODEC)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto")
    options = parser.parse_args()
    (one, trimmed), (many, others) = alone(options), cluster(options)
    table = Table("process", title="PSS, MiB", title_justify="left")
    for column in ("all", "weights, mapped", "own", "anonymous"):
        table.add_column(column, justify="right")
    sums = (sum(getattr(each, size) for each in many) for size in ("total", "weights", "anonymous"))
    total = Held("sum of the cluster", *sums)
    for row in (one, trimmed, *many, total):
        sizes = (row.total, row.weights, row.own, row.anonymous)
        table.add_row(row.name, *(f"{size / 2**20:.0f}" for size in sizes))
    console = Console(highlight=False)
    console.print(table)
    if others:
        console.print(f"{others} others map the same library or weights, whose pages count less than they should")
    ratio, strict = total.total / one.total, total.total / trimmed.total
    console.print(f"the cluster holds {ratio:.2f} times what one process holds; the target is at most {TARGET}")
    console.print(f"it holds {strict:.2f} times what one process needs that gives memory back, too")


if __name__ == "__main__":
    main()
