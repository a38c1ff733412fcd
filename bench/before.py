"""Another commit of this repository beside this one: `python -m bench.before TREE [--rounds 5] [--out docs]`.

TREE is a folder with the other commit, set up by its own Makefile. `bench.step`, `bench.kernels` and `bench.peers
codecs` of both commits run in turns on the same machine, each in its own tree. Every row that both report is compared.
The ratio of a row is the median over rounds of its time here by its time there. The smallest and largest ratio stand
beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from bench.cluster import load_note
from bench.sections import read_section, write_section
from hackkv.codecs import CODECS
from measure.accuracy.machine import this_machine

ALLOWED: Final = 1.03
"""A row counts as slower if its ratio is above this."""
RUN_S: Final = 900.0
HERE: Final = Path(__file__).resolve().parents[1]

Times = dict[str, float]
"""Row -> milliseconds."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A command, the section of performance.json that it writes, and a function that reads times from it."""

    name: str
    command: tuple[str, ...]
    section: str
    times: Callable[[Any], Times]


def step_times(section: Any) -> Times:
    """Milliseconds of a decode step of eight sequences of the shipped model, including the time between two steps."""
    return {f"step, {row['sampling']}": row["step_ms"] for row in section}


def kernel_times(section: Any) -> Times:
    """Milliseconds of our own kernels, without rivals."""
    return {
        f"{row['what']}, {row['shape']}, {codec}": ms
        for row in section["rows"]
        for codec, ms in row["ms"].items()
        if codec in CODECS
    }


def codec_times(section: Any) -> Times:
    """Median JCT of a request, and median times of its two longest stages, in milliseconds."""
    found: Times = {}
    for size, codecs in section["results"].items():
        for codec, jobs in codecs.items():
            where = f"{size} tokens, {codec}"
            found[f"{where}, JCT"] = 1e3 * median(job["jct_s"] for job in jobs)
            for stage in ("prefill", "decode"):
                found[f"{where}, {stage}"] = 1e3 * median(job["stages"][stage] for job in jobs)
    return found


BENCHES: Final = (
    Bench("step", ("bench.step",), "step", step_times),
    Bench("kernels", ("bench.kernels",), "cpu", kernel_times),
    Bench(
        "codecs",
        ("bench.peers", "codecs", "--only", "fp16,hack,hack-paper", "--sizes", "2048,8192"),
        "codecs",
        codec_times,
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row in both trees."""

    row: str
    before_ms: float
    now_ms: float
    ratios: tuple[float, ...]
    """The ratio of each round."""

    @property
    def ratio(self) -> float:
        """Median over rounds of the time here by the time there."""
        return median(self.ratios)

    def __str__(self) -> str:
        spread = f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"
        return f"| {self.row} | {self.before_ms:.3f} | {self.now_ms:.3f} | {self.ratio:.3f} | {spread} |"


def compared(rounds: list[tuple[Times, Times]]) -> Iterator[Compared]:
    """Rows that all rounds have, in the order of the first round; a round is (before, now)."""
    common = [row for row in rounds[0][0] if all(row in before and row in now for before, now in rounds)]
    for row in common:
        yield Compared(
            row,
            median(before[row] for before, _ in rounds),
            median(now[row] for _, now in rounds),
            tuple(now[row] / before[row] for before, now in rounds),
        )


def run(tree: Path, bench: Bench) -> Times:
    """Times of one run of `bench` in `tree`. Raises `SystemExit` with the output of a run that fails."""
    with TemporaryDirectory() as folder:
        Path(folder, "performance.md").write_text("# Performance\n")
        done = subprocess.run(
            [tree / ".venv/bin/python", "-m", *bench.command, "--out", folder],
            cwd=tree,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{bench.name} of {tree} failed:\n{done.stdout[-2000:]}")
        return bench.times(read_section(Path(folder), bench.section))


def commit_of(tree: Path) -> str:
    """Short hash of the commit in `tree`."""
    return subprocess.run(
        ["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def main() -> None:
    """Print the rows; exit with 1 if one is slower. With `--out`, write the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.before", description=__doc__)
    parser.add_argument("tree", type=Path, help="folder of the other commit, with its .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[bench.name for bench in BENCHES], action="append")
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    tree = args.tree.resolve()
    if not (tree / ".venv/bin/python").exists():
        parser.error(f"{tree} has no .venv/bin/python: set the other commit up by its own Makefile")
    began, lines, slower = load_note(), list[str](), 0
    head = f"| row | {commit_of(tree)}, ms | here, ms | here by before | over {args.rounds} rounds |"
    print(head)
    for bench in BENCHES:
        if args.only and bench.name not in args.only:
            continue
        rounds = []
        for at in range(args.rounds):
            order = (tree, HERE) if at % 2 == 0 else (HERE, tree)
            found = {each: run(each, bench) for each in order}
            rounds.append((found[tree], found[HERE]))
            print(f"{bench.name}: round {at + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for row in compared(rounds):
            slower += row.ratio > ALLOWED
            lines.append(str(row))
            print(row, flush=True)
    verdict = f"{slower} of {len(lines)} rows are slower by more than {ALLOWED - 1:.0%}."
    print(verdict)
    if args.out:
        machine = this_machine("", torch.get_num_threads()).cpu
        command = f"`python -m bench.before TREE --rounds {args.rounds} --out docs`"
        about = f"{command}, here {commit_of(HERE)} · {machine}, {began}"
        text = "\n".join(("## Beside an earlier commit", "", about, "", head, "|" + "---|" * 5, *lines, "", verdict))
        write_section(args.out, "before", text, lines)
    raise SystemExit(slower > 0)


if __name__ == "__main__":
    main()
