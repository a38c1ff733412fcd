"""`python -m bench.memory [MODEL] [--codec NAME] [--dtype NAME] [--weights W]`: memory of a cluster and of one process.

*PSS* is resident memory in which a page that n processes map counts 1/n in each. So the sum over processes is what the
machine holds. Of files, what other programs map too counts less here; *anonymous* pages, those of no file, do not
depend on what else runs. Two things are measured, one after the other, each after the same few requests:

- one process that loads the model and answers them (`hackkv.model.generate`), with nobody to share with;
- `hackkv serve MODEL`, 2 prefill and 2 decode nodes: every node, the router, and the command itself.

Weights are the pages of a mapped safetensors file. A model in Hugging Face's form is copied at load: then its weights
count as own memory, which the nodes of `hackkv serve` share, since they are forked from one process that loaded it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.generate import generate
from hackkv.model.packing import CHOICES
from hackkv.model.worker import load_worker
from hackkv.types import Request, Sampling

REQUESTS: Final = 8
PROMPT: Final = 200
NEW_TOKENS: Final = 8
TIMEOUT_S: Final = 300.0
TARGET: Final = 1.6


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
        """What is not weights in a mapped file: Python, torch, KV, copies of weights."""
        return self.total - self.weights


def held(name: str, pid: int) -> Held:
    """What the process `pid` holds now. Raises psutil's errors."""
    process = psutil.Process(pid)
    weights = sum(area.pss for area in process.memory_maps() if area.path.endswith(".safetensors"))
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (kibibytes,) = re.findall(r"^Pss_Anon: +(\d+) kB$", rollup, re.MULTILINE)
    return Held(name, process.memory_full_info().pss, weights, int(kibibytes) << 10)


def prompt(seed: int) -> list[int]:
    """A prompt of its own for each request: one that a node holds would draw all of them to that node."""
    return list(range(3 + seed, 3 + seed + PROMPT))


def alone(model: ModelConfig, codec: CodecConfig) -> Held:
    """One process that loads the model and answers the requests."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(model, codec, there))
    process.start()
    try:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError("the single process has not answered")
        here.recv()
        return held("one process", process.pid or 0)
    finally:
        here.close()
        process.terminate()
        process.join()


def _answer(model: ModelConfig, codec: CodecConfig, pipe: Connection) -> None:
    worker = load_worker(model, codec)
    for seed in range(REQUESTS):
        sampling = Sampling(seed=seed, max_tokens=NEW_TOKENS, ignore_eos=True)
        generate(worker, Request(str(seed), tuple(prompt(seed)), sampling))
    pipe.send("done")
    signal.pause()


def cluster(model: ModelConfig, codec: CodecConfig) -> list[Held]:
    """The processes of `hackkv serve`, after it answered the requests; the command itself comes first."""
    with _serving(model, codec) as (process, url), httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for seed in range(REQUESTS):
            body = {"model": name, "prompt": prompt(seed), "max_tokens": NEW_TOKENS, "seed": seed}
            client.post("/v1/completions", json=body).raise_for_status()
        children = psutil.Process(process.pid).children(recursive=True)
        return [held("hackkv serve", process.pid), *(held(child.name(), child.pid) for child in children)]


@contextmanager
def _serving(model: ModelConfig, codec: CodecConfig) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [str(Path(sys.executable).with_name("hackkv")), "serve", model.path, "--port", "0"]
    command += ["--codec", f"{codec.name},allow_loss", "--dtype", f"{model.dtype},{model.weights}"]
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
    parser.add_argument("--weights", default="auto", choices=CHOICES)
    options = parser.parse_args()
    codec = CodecConfig(name=options.codec)
    model = ModelConfig(path=options.model, dtype=options.dtype, weights=options.weights, threads=1)
    one, many = alone(model, codec), cluster(model, codec)
    table = Table("process", title="PSS, MiB", title_justify="left")
    for column in ("all", "weights, mapped", "own", "anonymous"):
        table.add_column(column, justify="right")
    sums = (sum(getattr(each, size) for each in many) for size in ("total", "weights", "anonymous"))
    total = Held("sum of the cluster", *sums)
    for row in (one, *many, total):
        sizes = (row.total, row.weights, row.own, row.anonymous)
        table.add_row(row.name, *(f"{size / 2**20:.0f}" for size in sizes))
    console = Console(highlight=False)
    console.print(table)
    ratio = total.total / one.total
    console.print(f"the cluster holds {ratio:.2f} times what one process holds; the target is at most {TARGET}")


if __name__ == "__main__":
    main()
