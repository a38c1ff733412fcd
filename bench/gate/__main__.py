"""`python -m bench.gate [MODEL] [--codec NAME] [--out docs]`: is the simulator right about this machine?

Times passes and steps (`bench.durations`), what surrounds them in an idle cluster of one prefill and one decode node
(`bench.gate.around`), then sends the cluster three loads, each several times, and simulates the same requests. Stages
are compared by mean (15%) and 90th percentile (25%); of the repeats the median counts. `--out` writes the tables into
plan.md. The exit code is 1 if a stage is farther off. Run it on a machine that does nothing else; on one that does,
with `--naps` nodes sleep as long as Mistral-7B would take on A10G and A100 (`sim.nodes`), and all else stays real.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from bench.cluster import load_note
from bench.gate.agreement import JCT, Compared, Runs, compare, spread
from bench.gate.around import Around, gpus, measure, spec_of
from bench.gate.live import Cluster, Subject, napping, stages_of, started
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from hackkv.errors import HackkvError
from hackkv.timing import Stage
from hackkv.types import Role
from measure.accuracy.machine import this_machine
from measure.serve.arrivals import arrival_times
from measure.serve.calls import Call
from measure.serve.shapes import Shape, Spread
from sim.cluster import Cluster as Simulated
from sim.costs import Profile, read_profile
from sim.jobs import Arrival
from sim.spec import Spec

SHAPES: Final = {
    "": Shape(Spread(800, 200, 1600), Spread(128, 32, 256)),
    "smollm2": Shape(Spread(300, 64, 900), Spread(32, 8, 64)),
}
"""Model -> lengths: the one that ships along is so fast that its requests have to be longer."""
SHARES: Final = (0.25, 0.45, 0.65)
"""Loads, of what the slower role serves."""
BATCH: Final = 8
"""Sequences of a step, in that account."""
LEAST_MS: Final = 5.0
"""Stages of less are not in the table."""
NAP_PAGES: Final = 2000
HEAD = ("load", "stage", "mean live, ms", "simulated", "error", "p90 live, ms", "simulated", "error")


@dataclass(frozen=True, slots=True)
class Load:
    """One load, live and simulated."""

    share: float
    rate: float
    requests: int
    live: Runs
    simulated: dict[str, list[float]]

    @property
    def compared(self) -> list[Compared]:
        """Every stage and statistic."""
        return compare(self.live, self.simulated)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, compare, print; returns the exit code."""
    parser = argparse.ArgumentParser("python -m bench.gate", description=__doc__)
    parser.add_argument("model", nargs="?", default="", choices=tuple(SHAPES), help="default: the shipped model")
    parser.add_argument("--codec", default=DEFAULT_CODEC, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of each load; default: %(default)s")
    parser.add_argument("--naps", action="store_true", help="nodes without weights, which nap")
    parser.add_argument("--out", type=Path, help="folder of plan.md, whose section is written")
    args = parser.parse_args(arguments)
    subject, before = Subject(args.model, args.codec), load_note()
    loads = asyncio.run(_hold(subject, args.seconds, args.repeats, naps=args.naps))
    lines = table(loads)
    print("\n".join(lines))
    if args.out:
        name = args.model or "hackkv-small"
        where = f"{this_machine('', 1).cpu}, {before}"
        naps = "--naps" if args.naps else ""
        length = f"--seconds {args.seconds:g} --repeats {args.repeats}"
        words = ("python -m bench.gate", args.model, f"--codec {args.codec}", length, naps, "--out docs")
        command = " ".join(filter(None, words))
        text = "\n".join((f"`{command}` · {where}", "", *lines))
        write_section(args.out, f"gate-{name}-{args.codec}{naps}", text, record(loads, where), page="plan")
    return 0 if all(each.agrees for load in loads for each in load.compared) else 1


async def _hold(subject: Subject, seconds: float, repeats: int, *, naps: bool) -> list[Load]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        if naps:
            alone = gpus(subject.codec)
            file.write_text(alone.model_dump_json(), encoding="utf-8")
            pages = dict.fromkeys((Role.PREFILL, Role.DECODE), NAP_PAGES)
            opened = napping(subject, spec_of(subject, pages, file, Around.nothing(alone)), Path(folder))
        else:
            alone = await _time_alone(subject, file)
            opened = started(subject)
        async with opened as cluster:
            around = await measure(cluster, alone)
            print(around)
            profile = around.profile(alone)
            in_node = file.with_name("in_node.json")
            in_node.write_text(profile.model_dump_json(), encoding="utf-8")
            spec = spec_of(subject, cluster.pages, in_node, around)
            shape = SHAPES[subject.model]
            most = capacity(profile, shape, around.prefill_beside, around.decode_beside)
            return [await _load(cluster, spec, shape, (share, share * most), seconds, repeats) for share in SHARES]


async def _time_alone(subject: Subject, file: Path) -> Profile:
    """What `bench.durations` measures, in a process of its own."""
    own = ["--model", subject.model, "--codec", subject.codec, "--dtype", subject.dtype, "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.durations", *own, "--out", str(file), stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise HackkvError("bench.durations failed; its message is above")
    return read_profile(file)


def capacity(profile: Profile, shape: Shape, prefill_beside: float, decode_beside: float) -> float:
    """Requests a second that the slower role serves."""
    prompt, tokens = shape.prompt.mean, shape.output.mean
    chunk = min(prompt, profile.prefill.rows[-1])
    pass_s = prompt / chunk * profile.prefill.at(chunk, (prompt - chunk) / 2, "pass") * prefill_beside
    step_s = profile.decode.at(BATCH, prompt + tokens / 2, "step") * decode_beside
    return min(1 / pass_s, BATCH / (step_s * tokens))


async def _load(
    cluster: Cluster, spec: Spec, shape: Shape, load: tuple[float, float], seconds: float, repeats: int
) -> Load:
    share, rate = load
    rng = np.random.default_rng(round(100 * share))
    count = max(8, round(rate * seconds))
    arrivals = arrival_times(count, rate, 1.0, rng)
    sizes = list(zip(arrivals, shape.prompt.draw(count, rng), shape.output.draw(count, rng), strict=True))
    live = []
    calls: list[Call] = []
    for _ in range(repeats):
        calls = [cluster.call(*size) for size in sizes]
        live.append(stages_of(await cluster.send(calls)))
    return Load(share, rate, count, live, simulate(spec, calls))


def simulate(spec: Spec, calls: Sequence[Call]) -> dict[str, list[float]]:
    """Stage, and `JCT`, -> seconds of the same requests in the simulator."""
    rows = Simulated(spec).run([Arrival(each.at_s, each.prompt_tokens, each.output_tokens) for each in calls]).rows
    return {JCT: list(rows["e2el_s"]), **{str(stage): list(rows[f"{stage}_s"]) for stage in Stage}}


def table(loads: Sequence[Load]) -> list[str]:
    """A line for the JCT and for every stage that takes time, and what lies outside the bounds."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for load in loads:
        compared = load.compared
        of = f"{load.share:.0%}: {load.requests} at {load.rate:.2f}/s, repeats within {spread(load.live):.0%}"
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


def record(loads: Sequence[Load], where: str) -> dict[str, Any]:
    """Numbers for the page's JSON."""
    return {
        "where": where,
        "loads": [
            {
                "share": load.share,
                "rate": load.rate,
                "requests": load.requests,
                "spread": spread(load.live),
                "compared": [
                    {"stage": each.stage, "statistic": each.statistic, "live": each.live, "simulated": each.simulated}
                    for each in load.compared
                ],
            }
            for load in loads
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
