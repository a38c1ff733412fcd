"""`python -m bench.gate [MODEL] [--codec NAME] [--out docs]`: is the simulator right about this machine?

It times passes and steps (`bench.durations`) and what surrounds them in an idle cluster of one prefill and one decode
node (`bench.gate.around`). Then it sends the cluster three loads, each several times, and simulates the same requests.
Stages are compared by mean (15%) and 90th percentile (25%); the median of the repeats counts. `--out` writes the tables
into plan.md. The exit code is 1 if a stage is farther off. Run it on a machine that does nothing else. On a busy one,
use `--naps`: nodes sleep as long as Mistral-7B would take on A10G and A100 (`sim.nodes`), and all else stays real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from bench.cluster import load_note
from bench.gate.agreement import Compared, Runs, compare, spread
from bench.gate.around import Around, gpus, measure, spec_of
from bench.gate.live import Cluster, Subject, napping, started
from bench.gate.recording import Load, Recording, read_recording
from bench.gate.simulated import simulate, spec_of_record
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from hackkv.errors import HackkvError
from hackkv.types import Role
from measure.accuracy.machine import this_machine
from measure.serve.arrivals import arrival_times
from measure.serve.shapes import Shape, Spread
from sim.costs import Profile, read_profile

SHAPES: Final = {
    "": Shape(Spread(800, 200, 1600), Spread(128, 32, 256)),
    "smollm2": Shape(Spread(300, 64, 900), Spread(32, 8, 64)),
}
"""Model -> lengths. The shipped model is so fast that its requests have to be longer."""
SHARES: Final = (0.25, 0.45, 0.65)
"""Loads, as shares of the rate that the slower role serves (`capacity`)."""
BATCH: Final = 8
"""Sequences of a step, in `capacity`."""
LEAST_MS: Final = 5.0
"""Shorter stages are left out of the table."""
NAP_PAGES: Final = 2000
HEAD = ("load", "stage", "mean live, ms", "simulated", "error", "p90 live, ms", "simulated", "error")


@dataclass(frozen=True, slots=True)
class Judged:
    """One load, live and simulated."""

    load: Load
    simulated: Mapping[str, Sequence[float]]

    @property
    def live(self) -> Runs:
        """Stages of every repeat of the live load."""
        return [phase.stages for phase in self.load.repeats]

    @property
    def compared(self) -> list[Compared]:
        """Every statistic of every stage."""
        return compare(self.live, self.simulated)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, simulate, compare, print; returns the exit code."""
    parser = argparse.ArgumentParser("python -m bench.gate", description=__doc__)
    parser.add_argument("model", nargs="?", default="", choices=tuple(SHAPES), help="default: the shipped model")
    parser.add_argument("--codec", default=DEFAULT_CODEC, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of each load; default: %(default)s")
    parser.add_argument("--naps", action="store_true", help="nodes without weights, which nap")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="keep what was measured live")
    parser.add_argument("--recorded", type=Path, metavar="FILE.json", help="judge by this record; nothing is measured")
    parser.add_argument("--cores", type=float, help="judge as if the machine had so many; only prints")
    parser.add_argument("--out", type=Path, help="folder of plan.md, whose section is written")
    args = parser.parse_args(arguments)
    if args.cores and (args.record or args.out):
        parser.error("--cores asks what if, and neither records nor writes tables")
    recording = read_recording(args.recorded) if args.recorded else asyncio.run(_record(args))
    if args.cores:
        recording = recording.model_copy(update={"cores": args.cores})
    if args.record:
        args.record.write_text(recording.model_dump_json() + "\n", encoding="utf-8")
    loads = judge(recording)
    lines = table(loads)
    print("\n".join(lines))
    if args.out:
        name = f"gate-{recording.model or 'hackkv-small'}-{recording.codec}{'--naps' if recording.naps else ''}"
        ran = f"`{recording.command}` · {recording.where}"
        if args.recorded:
            ran = f"`python -m bench.gate --recorded {args.recorded} --out {args.out}` · recorded by {ran}"
        text = "\n".join((ran, "", *lines))
        write_section(args.out, name, text, record(loads, recording.where), page="plan")
    return 0 if all(each.agrees for load in loads for each in load.compared) else 1


def _command(args: argparse.Namespace) -> str:
    length = f"--seconds {args.seconds:g} --repeats {args.repeats}"
    naps, kept = "--naps" if args.naps else "", f"--record {args.record}" if args.record else ""
    return " ".join(filter(None, ("python -m bench.gate", args.model, f"--codec {args.codec}", length, naps, kept)))


async def _record(args: argparse.Namespace) -> Recording:
    """Run the cluster and record its times."""
    where = f"{this_machine('', 1).cpu}, {load_note()}"
    subject = Subject(args.model, args.codec)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        if args.naps:
            alone = gpus(subject.codec)
            file.write_text(alone.model_dump_json(), encoding="utf-8")
            pages = dict.fromkeys((Role.PREFILL, Role.DECODE), NAP_PAGES)
            spec = spec_of(subject.shape, subject.codec, pages, file, Around.nothing(alone))
            opened = napping(subject, spec, Path(folder))
        else:
            alone = await _time_alone(subject, file)
            opened = started(subject)
        async with opened as cluster:
            idle = await measure(cluster, alone)
            most = capacity(Around.of(alone, idle).profile(alone), SHAPES[subject.model])
            return Recording(
                command=_command(args),
                where=where,
                model=subject.model,
                codec=subject.codec,
                naps=args.naps,
                cores=os.cpu_count() or 1,
                shape=subject.shape,
                pages=cluster.pages,
                alone=alone,
                idle=idle,
                loads=tuple([await _load(cluster, share, share * most, args) for share in SHARES]),
            )


async def _time_alone(subject: Subject, file: Path) -> Profile:
    """The profile of `bench.durations`, measured in a process of its own."""
    own = ["--model", subject.model, "--codec", subject.codec, "--dtype", subject.dtype, "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.durations", *own, "--out", str(file), stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise HackkvError("bench.durations failed; its message is above")
    return read_profile(file)


def capacity(profile: Profile, shape: Shape) -> float:
    """Requests a second that the slower role serves."""
    prompt, tokens = shape.prompt.mean, shape.output.mean
    chunk = min(prompt, profile.prefill.rows[-1])
    pass_s = prompt / chunk * profile.prefill.at(chunk, (prompt - chunk) / 2, "pass")
    step_s = profile.decode.at(BATCH, prompt + tokens / 2, "step")
    return min(1 / pass_s, BATCH / (step_s * tokens))


async def _load(cluster: Cluster, share: float, rate: float, args: argparse.Namespace) -> Load:
    rng, shape = np.random.default_rng(round(100 * share)), SHAPES[args.model]
    count = max(8, round(rate * args.seconds))
    arrivals = arrival_times(count, rate, 1.0, rng)
    sizes = list(zip(arrivals, shape.prompt.draw(count, rng), shape.output.draw(count, rng), strict=True))
    repeats = [await cluster.timed([cluster.call(*size) for size in sizes]) for _ in range(args.repeats)]
    return Load(share=share, rate=rate, repeats=tuple(repeats))


def judge(recording: Recording) -> list[Judged]:
    """Simulate the recorded requests and pair the results with the live ones."""
    with TemporaryDirectory() as folder:
        spec = spec_of_record(recording, Path(folder) / "profile.json")
        return [Judged(load, simulate(spec, load.repeats[-1].sizes)) for load in recording.loads]


def table(loads: Sequence[Judged]) -> list[str]:
    """A line for the JCT and for every stage that takes time, and the statistics outside the bounds."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for judged in loads:
        compared, load = judged.compared, judged.load
        requests = len(load.repeats[-1].sizes)
        of = f"{load.share:.0%}: {requests} at {load.rate:.2f}/s, repeats within {spread(judged.live):.0%}"
        half = len(compared) // 2
        for mean, p90 in zip(compared[:half], compared[half:], strict=True):
            if max(mean.live, mean.simulated) * 1e3 < LEAST_MS:
                continue
            lines.append(f"| {of} | {mean.stage} | {_cells(mean)} | {_cells(p90)} |")
            of = ""
    every = [each for load in loads for each in load.compared]
    off = [each for each in every if not each.agrees]
    worst = "".join(f"; {each.statistic} of {each.stage} {each.error:+.0%}" for each in off)
    lines += ["", f"{len(every) - len(off)} of {len(every)} statistics agree{worst}"]
    return lines


def _cells(of: Compared) -> str:
    mark = "" if of.agrees else " **off**"
    return f"{1e3 * of.live:.0f} | {1e3 * of.simulated:.0f} | {of.error:+.0%}{mark}"


def record(loads: Sequence[Judged], where: str) -> dict[str, Any]:
    """The numbers for the page's JSON."""
    return {
        "where": where,
        "loads": [
            {
                "share": judged.load.share,
                "rate": judged.load.rate,
                "requests": len(judged.load.repeats[-1].sizes),
                "spread": spread(judged.live),
                "compared": [
                    {"stage": each.stage, "statistic": each.statistic, "live": each.live, "simulated": each.simulated}
                    for each in judged.compared
                ],
            }
            for judged in loads
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
