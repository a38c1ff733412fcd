"""docs/codecs.md by one command: joins the measurements of every codec, and names missing ones with their commands.

    python -m bench.codecs                  write the sections of the page from the records
    python -m bench.codecs kernels          measure the kernels first; contenders take turns
    sudo .venv/bin/python -m bench.codecs jct [--rows hack,fp8] [--links 1gbit] [--prompts 4k]
                                            measure job completion times first; continue an earlier run
                                            of this processor with as many --threads

Loss is that of `hackkv eval --model smollm2 --out docs/accuracy`. Times are recorded in codecs.json beside the page.
`jct` needs root, for network namespaces and tc (Debian: iproute2, util-linux). It asks for a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from bench.codecs import plots, tables, verdict
from bench.codecs.facts import Facts, gather
from bench.codecs.jct import LINKS, PROMPTS, Record, Wanted, by_key, measured
from bench.codecs.rows import ROWS
from bench.jct import check_machine
from bench.kernels import machine, own_backend, take_priority
from bench.kernels_codecs import codec_rows
from bench.kernels_limits import measure_limits
from bench.kernels_report import console_line
from bench.sections import read_section, write_section
from hackkv.errors import ConfigError, HackkvError
from measure.accuracy.machine import this_machine

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
PAGE: Final = "codecs"
BYTES_PICTURE, JCT_PICTURE = "codecs-bytes.png", "codecs-jct.png"
STAGES_PAGE: Final = "codecs-jct.md"
SIZES: Final = (16384, 4096, 4096)
"""Tokens of decode, of prefill and of seals."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement that is asked for, then write the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m bench.codecs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", nargs="?", choices=tuple(MEASURE), help="what to measure first; default: nothing")
    parser.add_argument("--rows", default="all", help="codecs of jct, separated by commas; default: all")
    parser.add_argument("--links", default=",".join(LINKS), help="of jct; default: %(default)s")
    parser.add_argument("--prompts", default=",".join(PROMPTS), help="of jct; default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("build/codecs-jct"), help="where cells of jct are kept")
    parser.add_argument("--threads", type=int, default=1, help="of kernels; in jct, of a node; default: %(default)s")
    parser.add_argument("--anew", action="store_true", help="jct may drop the recorded times of another machine")
    parser.add_argument("--accuracy", type=Path, default=DOCS / "accuracy", help="the folder of `hackkv eval`")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page; default: docs")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        if options.measure:
            MEASURE[options.measure](options, console)
        write(options.accuracy, options.out)
    except HackkvError as error:
        console.print(f"bench.codecs: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 130
    console.print(f"wrote {options.out / PAGE}.md", soft_wrap=True)
    return 0


def measure_kernels(options: argparse.Namespace, console: Console) -> None:
    """Record decode, prefill and seals of all page formats."""
    priority = take_priority()
    torch.set_num_threads(options.threads)
    backend = own_backend(options.threads)
    about = machine(backend, measure_limits(backend), priority)
    rows = list[dict[str, Any]]()
    for row in codec_rows(backend, own_backend(threads=1), SIZES):
        console.print(console_line(row, []), soft_wrap=True)
        rows.append(asdict(row))
    told = "{processor}, {threads} of {cores} cores, {isa}, reads {read_gb_per_s} GB/s, load average {load_average}"
    record = {"machine": told.format(**about), "rows": rows}
    write_section(options.out, "kernels", tables.kernels(record), record, PAGE)


def measure_jct(options: argparse.Namespace, console: Console) -> None:
    """Record job completion times, codec by codec."""
    links, prompts = options.links.split(","), options.prompts.split(",")
    names = [name for name in ROWS if ROWS[name].timed] if options.rows == "all" else options.rows.split(",")
    for what, known in ((names, ROWS), (prompts, PROMPTS)):
        if unknown := next((each for each in what if each not in known), None):
            raise ConfigError(f"{unknown!r} is unknown; known: {', '.join(known)}")
    about = {"machine": jct_machine(options.threads)}
    before = read_section(options.out, "jct", PAGE)
    if before and before["machine"] != about["machine"] and not options.anew:
        # Times of two machines do not belong in one table.
        raise ConfigError(
            f"{options.out} has times of {before['machine']}, and these would be of {about['machine']}: "
            "give another --out, or --anew to drop those"
        )
    check_machine(links)
    wanted = Wanted([ROWS[name] for name in names], links, prompts, options.threads)
    for cells in measured(wanted, options.work):
        for name, cell in cells.items():
            console.print(f"{name:34} {cell['mean_e2el_ms'] / 1e3:8.2f} s", markup=False)
        before = read_section(options.out, "jct", PAGE)
        kept = before["cells"] if before and before["machine"] == about["machine"] else {}
        write_section(options.out, "jct", "", {**about, "cells": {**kept, **cells}}, PAGE)


def jct_machine(threads: int) -> str:
    """The processor with its instruction set, and the threads of a node."""
    here = this_machine("cpu", 1)
    isa = own_backend(threads).isa
    return f"{here.cpu}, {here.cores} cores, {isa}; {threads} compute {'thread' if threads == 1 else 'threads'} a node"


MEASURE: Final[dict[str, Callable[[argparse.Namespace, Console], None]]] = {
    "kernels": measure_kernels,
    "jct": measure_jct,
}


def write(accuracy: Path, out: Path) -> None:
    """Write every section, both pictures and the page of stages from the records."""
    kernels, jct = (read_section(out, name, PAGE) for name in ("kernels", "jct"))
    cells: dict[str, Record] = jct["cells"] if jct else {}
    facts = gather(accuracy, by_key(cells))
    sections = {
        "bytes": (tables.bytes_and_loss(facts), None),
        "pictures": (_pictures(facts, out), None),
        "kernels": (tables.kernels(kernels), kernels),
        "jct": (tables.jct(facts), jct),
        "comparison": (verdict.comparison(facts), None),
        "advice": (verdict.advice(facts), None),
    }
    for name, (text, data) in sections.items():
        write_section(out, name, text, data, PAGE)
    where = jct["machine"] if jct else "no machine yet"
    (out / STAGES_PAGE).write_text(tables.stages(facts, where), encoding="utf-8")


def _pictures(facts: Sequence[Facts], out: Path) -> str:
    drawn = [
        f"![{what}]({name})"
        for name, what, done in (
            (BYTES_PICTURE, "KL against bytes", plots.by_bytes(facts, out / BYTES_PICTURE)),
            (JCT_PICTURE, "KL against job completion time", plots.by_jct(facts, out / JCT_PICTURE)),
        )
        if done
    ]
    return "\n\n".join(drawn)


if __name__ == "__main__":
    sys.exit(main())
