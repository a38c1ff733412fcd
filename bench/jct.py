"""The paper's experiment in small: job completion time of `fp16` and `hack` over links of several speeds.

    python -m bench.jct            all links; as root, for network namespaces and tc (Debian: iproute2, util-linux)

Each link is a network namespace whose loopback device passes so many bits a second; a cluster of one prefill and one
decode node lives in it. Requests arrive as a Poisson process at a share of what `hack` can serve on the free link, at
the same rate in every cell. Writes docs/jct.json, docs/jct.md and a picture for each prompt length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.accuracy.machine import this_machine
from bench.cluster import load_note
from hackkv.cluster import ClusterPlan, running
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model
from hackkv.timing import Stage

DOCS = Path(__file__).resolve().parents[1] / "docs"
FREE: Final = "none"
LINKS: Final = ("200mbit", "1gbit", "10gbit", FREE)
CODECS: Final = ("fp16", "hack")
PROMPTS: Final = {"short": 300, "long": 3000}
"""Name -> tokens; the model that ships with hackkv has a context of 4,096."""
OUTPUT_TOKENS: Final = 64
SHARE: Final = 0.8
CELL_TIMEOUT_S: Final = 600.0


def main() -> int:
    """Run everything, or one cell in the namespace it was started in."""
    parser = argparse.ArgumentParser("python -m bench.jct", description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS), help="rates as tc writes them; none is unthrottled")
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--requests", type=int, default=40, help="requests per cell")
    parser.add_argument("--work", type=Path, default=Path("build/jct"), help="folder for the cells' results")
    parser.add_argument("--cell", nargs=4, metavar=("CODEC", "PROMPT", "RATE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        codec, prompt, rate, file = arguments.cell
        return asyncio.run(_cell(codec, PROMPTS[prompt], rate, arguments.requests, Path(file)))
    console = Console(highlight=False)
    try:
        cells = _measure(arguments, console)
    except ConfigError as error:
        console.print(f"[red]bench.jct: {error}[/]")
        return 2
    _write(cells, arguments, console)
    return 0


def _measure(arguments: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    """All cells, by 'prompt/link/codec'."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is not installed; Debian has it in util-linux and iproute2")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root")
    arguments.work.mkdir(parents=True, exist_ok=True)
    cells: dict[str, dict[str, Any]] = {}
    for prompt in PROMPTS:
        calm = _run_cell("hack", prompt, FREE, "inf", arguments, console)
        rate = SHARE * calm["request_throughput"]
        console.print(f"{prompt}: hack serves {calm['request_throughput']:.2f} requests/s; the load is {rate:.2f}/s")
        for link in arguments.links.split(","):
            for codec in arguments.codecs.split(","):
                cells[f"{prompt}/{link}/{codec}"] = _run_cell(codec, prompt, link, f"{rate:.4f}", arguments, console)
    return cells


def _run_cell(
    codec: str, prompt: str, link: str, rate: str, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """One codec, prompt length and link, in a namespace of its own."""
    file = arguments.work / f"{prompt}-{link}-{codec}{'-calm' if rate == 'inf' else ''}.json"
    # A bucket of 256 KB: loopback hands over packets of 64 KB, and a smaller one would lose them.
    shape = f"tc qdisc add dev lo root tbf rate {link} burst 256kb latency 10s &&" if link != FREE else ""
    command = [sys.executable, "-m", "bench.jct", "--requests", str(arguments.requests), "--cell"]
    inner = f'ip link set lo up && {shape} exec "$@"'
    with console.status(f"{prompt} prompts, {link}, {codec}"):
        subprocess.run(
            ["unshare", "--net", "sh", "-c", inner, "sh", *command, codec, prompt, rate, str(file)],
            check=True,
            timeout=CELL_TIMEOUT_S,
        )
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    console.print(f"{prompt:>6} {link:>8} {codec:>6}: mean JCT {result['mean_e2el_ms']:8.0f} ms")
    return result


async def _cell(codec: str, prompt_tokens: int, rate: str, requests: int, file: Path) -> int:
    """Start a cluster here and load it; returns the load generator's exit code."""
    model = str(find_model("").path)
    worker = {"model": {"path": model, "threads": 1}, "codec": {"name": codec}}
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model}
    # Prompts are real text and begin alike: reuse would measure the text.
    plan = ClusterPlan(router, worker, 1, 1, prefill={"prefix_cache": False})
    async with running(plan, lambda _: None) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.serve", "--base-url", cluster.url, "--tokenizer", model),
            *("--num-prompts", str(requests), "--request-rate", rate, "--num-warmups", "4", "--seed", "1"),
            *(("--max-concurrency", "16") if rate == "inf" else ()),
            *("--input-len", str(prompt_tokens), "--output-len", str(OUTPUT_TOKENS), "--out", str(file)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait()


def _write(cells: dict[str, dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    """The numbers, a page to read and the pictures."""
    kept = ("mean_e2el_ms", "median_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "mean_tpot_ms", "failed", "stages")
    machine = this_machine("cpu", 1)
    numbers = {name: {key: cell[key] for key in kept} for name, cell in cells.items()}
    record = {"machine": machine.cpu, "cores": machine.cores, "load": load_note(), "cells": numbers}
    (DOCS / "jct.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = _page(cells, arguments, f"{machine.cpu}, {load_note()}")
    (DOCS / "jct.md").write_text(page, encoding="utf-8")
    for prompt in PROMPTS:
        files = []
        for name, cell in cells.items():
            length, link, codec = name.split("/")
            if length == prompt:
                files.append(arguments.work / f"labelled-{prompt}-{link}-{codec}.json")
                files[-1].write_text(json.dumps(cell | {"label": f"{codec}\n{link}"}), encoding="utf-8")
        picture = str(DOCS / f"jct-{prompt}.png")
        subprocess.run([sys.executable, "-m", "bench.serve.plot", *map(str, files), "--out", picture], check=True)
    console.print(f"wrote {DOCS / 'jct.md'}")


def _page(cells: dict[str, dict[str, Any]], arguments: argparse.Namespace, machine: str) -> str:
    lines = [
        "# Job completion time by link and codec",
        "",
        "The paper's experiment in small, made by `python -m bench.jct` (as root: each link is a network namespace",
        "whose loopback device is shaped by `tc`). The model is the one that ships with hackkv; one prefill and one",
        f"decode node, a compute thread each; {arguments.requests} requests per cell, {OUTPUT_TOKENS} tokens out,",
        f"Poisson arrivals at {SHARE:.0%} of what `hack` serves on the free link. Milliseconds; {machine}.",
    ]
    for prompt, tokens in PROMPTS.items():
        lines += [
            "",
            f"## {prompt.capitalize()} prompts ({tokens} tokens)",
            "",
            f"![stacked bars](jct-{prompt}.png)",
            "",
        ]
        lines += _table(cells, prompt)
    return "\n".join([*lines, "", *_reading(cells), ""])


def _table(cells: dict[str, dict[str, Any]], prompt: str) -> Sequence[str]:
    head = ["link", "codec", "JCT mean", "p50", "p99", "TTFT", *Stage]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, cell in cells.items():
        length, link, codec = name.split("/")
        if length == prompt:
            times = [cell[f"{kind}_e2el_ms"] for kind in ("mean", "median", "p99")] + [cell["mean_ttft_ms"]]
            times += [cell["stages"][stage]["mean"] for stage in Stage]
            rows.append(f"| {link} | {codec} | " + " | ".join(f"{time:.1f}" for time in times) + " |")
    return rows


def _reading(cells: dict[str, dict[str, Any]]) -> Sequence[str]:
    """Where `hack` helps and where it does not, as the numbers have it."""
    if not {"fp16", "hack"} <= {name.split("/")[2] for name in cells}:
        return []
    lines = ["## Reading it", "", "Mean JCT of `hack` over that of `fp16`; above 1, `hack` does not help:", ""]
    lines += ["| prompts | link | JCT ratio | transfer ratio |", "|---|---|---|---|"]
    for name, cell in cells.items():
        prompt, link, codec = name.split("/")
        if codec == "hack":
            exact = cells[f"{prompt}/{link}/fp16"]
            moved = cell["stages"][Stage.TRANSFER]["mean"] / exact["stages"][Stage.TRANSFER]["mean"]
            lines.append(f"| {prompt} | {link} | {cell['mean_e2el_ms'] / exact['mean_e2el_ms']:.2f} | {moved:.2f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
