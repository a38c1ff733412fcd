"""The paper's experiment in small: job completion time of `fp16` and `hack` over links of several speeds.

    python -m bench.jct            all links; as root, for network namespaces and tc (Debian: iproute2, util-linux)
    python -m bench.jct --links 200mbit,none --requests 6 --out build/jct      to try it

Each cell is a cluster of one prefill and one decode node in a network namespace. Everything that is sent to the decode
node passes a link of limited rate. Requests arrive as a Poisson process, at a share of the rate that the slower codec
can serve on the free link, and at the same moments in every cell. Writes jct.json, jct.md and a picture for each prompt
length after every cell; --resume goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.cluster import load_note
from bench.links.cell import PROMPTS, Cell, Result, done, run
from bench.links.link import FREE, bits_per_s
from bench.links.page import Setting, page
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from measure.accuracy.machine import this_machine
from measure.serve.plot import ResultFile, draw

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
LINKS: Final = ("200mbit", "1gbit", "10gbit", FREE)
CODECS: Final = ("fp16", "hack")
SHARE: Final = 0.8
CAPACITY: Final = {"short": 48, "long": 12}
"""Prompt -> number of requests by which a codec's capacity is measured."""
CONCURRENCY: Final = 8
"""Number of these requests under way at once: enough to keep both nodes busy."""


def main() -> int:
    """Run every cell; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bench.jct", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default=",".join(LINKS), help="rates as tc writes them; none is unthrottled")
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--seconds", type=float, default=25.0, help="length of the load in each cell; default: 25")
    parser.add_argument("--requests", type=int, default=1000, help="most requests in a cell; default: 1000")
    parser.add_argument("--work", type=Path, default=Path("build/jct"), help="folder for the cells' own results")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for page, numbers and pictures; default: docs")
    parser.add_argument("--resume", action="store_true", help="keep the cells in --work that are done")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    try:
        _run_all(arguments, console)
    except ConfigError as error:
        console.print(f"bench.jct: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from here")
        return 130
    return 0


def _run_all(arguments: argparse.Namespace, console: Console) -> None:
    links, codecs = arguments.links.split(","), arguments.codecs.split(",")
    check_machine(links)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        for old in arguments.work.glob("*.json"):
            old.unlink()
    began = load_note()
    cells: dict[str, Result] = {}
    capacity: dict[str, dict[str, float]] = {}
    total = len(PROMPTS) * (1 + len(links)) * len(codecs)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, speed_estimate_period=math.inf) as progress:
        bar = progress.add_task("", total=total)
        for prompt in PROMPTS:
            capacity[prompt] = {}
            for codec in codecs:
                progress.update(bar, description=f"{prompt} prompts, what {codec} can serve")
                count = min(CAPACITY[prompt], arguments.requests)
                most = _cell(prompt, FREE, codec, count).model_copy(update={"concurrency": CONCURRENCY})
                capacity[prompt][codec] = served = _measured(most, arguments.work)["request_throughput"]
                console.print(f"{prompt:>6} {FREE:>8} {codec:>6}: serves {served:.2f} requests/s")
                progress.advance(bar)
            rate = SHARE * min(capacity[prompt].values())
            requests = max(1, min(arguments.requests, round(rate * arguments.seconds)))
            for link in links:
                for codec in codecs:
                    cell = _cell(prompt, link, codec, requests).model_copy(update={"rate": rate})
                    progress.update(bar, description=f"{prompt} prompts, {link}, {codec}")
                    cells[cell.name] = result = _measured(cell, arguments.work)
                    console.print(f"{prompt:>6} {link:>8} {codec:>6}: mean JCT {result['mean_e2el_ms']:8.0f} ms")
                    _write(cells, capacity, began, arguments.out)
                    progress.advance(bar)
    console.print(f"wrote {arguments.out / 'jct.md'}")


def _cell(prompt: str, link: str, codec: str, requests: int) -> Cell:
    tokens = PROMPTS[prompt]
    return Cell(prompt=prompt, tokens=tokens, link=link, row=codec, codec=CodecConfig(name=codec), requests=requests)


def _measured(cell: Cell, work: Path) -> Result:
    """The result of a cell; it is measured with a cluster of its own unless an earlier run has measured it."""
    run([cell], work)
    result = done(cell, work)
    assert result is not None, "the cell ran"
    return result


def check_machine(links: list[str]) -> None:
    """Raise `ConfigError` if this machine cannot make links, or if a link's name is no rate."""
    for link in links:
        if link != FREE:
            bits_per_s(link)
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is not installed; Debian has it in util-linux and iproute2")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root")


def _write(cells: dict[str, Result], capacity: dict[str, dict[str, float]], load: str, folder: Path) -> None:
    """Write the numbers, the page, and the picture of the prompts that are being measured."""
    machine = this_machine("cpu", 1)
    kept = [f"{kind}_{metric}_ms" for metric in ("e2el", "ttft", "tpot") for kind in ("mean", "median", "p99")]
    kept += ["completed", "failed", "request_rate", "request_throughput", "stages", "sub_stages", "kv"]
    numbers = {name: {key: cell[key] for key in [*kept, "link_bits_per_s"]} for name, cell in cells.items()}
    record = {"machine": machine.cpu, "before": load, "capacity": capacity, "cells": numbers}
    (folder / "jct.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    setting = Setting(f"{machine.cpu}, {load} before the run", SHARE, capacity)
    (folder / "jct.md").write_text(page(cells, setting), encoding="utf-8")
    prompt = list(capacity)[-1]
    runs = [
        ResultFile.model_validate({**cell, "label": "{2}\n{1}".format(*name.split("/"))})
        for name, cell in cells.items()
        if name.startswith(f"{prompt}/")
    ]
    draw(runs, folder / f"jct-{prompt}.png")


if __name__ == "__main__":
    sys.exit(main())
