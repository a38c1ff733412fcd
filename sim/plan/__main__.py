"""`hackkv plan SPEC.yaml`: what to buy for a load and an objective.

Formulas screen every instance, split over GPUs and codec that the specification's `plan` section allows; the best are
simulated until as few replicas as possible keep the objective. Writes plan.md and plan.json. docs/plan.md has examples.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from hackkv.errors import ConfigError, HackkvError
from sim.plan.following import FollowedLoad, follow
from sim.plan.objective import parse
from sim.plan.report import report
from sim.plan.screen import demand_of
from sim.plan.search import Trial, most, search
from sim.spec import read_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; returns the exit code: 2 if nothing can keep the objective, or something cannot be used."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(arguments)
    notes = Console(stderr=True, highlight=False)
    try:
        lines, data = _plan(args, f"hackkv plan {shlex.join(arguments)}", notes)
    except HackkvError as error:
        notes.print(f"hackkv plan: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    page = "\n".join(lines).rstrip() + "\n"
    (args.out / "plan.md").write_text(page, encoding="utf-8")
    (args.out / "plan.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    Console().print(Markdown(page))
    notes.print(f"wrote {args.out}", markup=False, soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hackkv plan", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml", help="model, load, and what may be bought (`plan`)")
    parser.add_argument("--slo", required=True, metavar="LIMITS", help="for example ttft_p90=2s,tpot_p90=50ms")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "--rate", type=_positive, metavar="PER_S", help="requests per second to serve as cheaply as possible"
    )
    goal.add_argument(
        "--budget", type=_positive, metavar="USD", help="dollars per hour to serve as much as possible with"
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--out", type=Path, default=Path("plan"), metavar="DIR", help="default: %(default)s")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _plan(args: argparse.Namespace, command: str, notes: Console) -> tuple[list[str], dict[str, Any]]:
    spec, limits = read_spec(args.spec), parse(args.slo)
    if spec.host is not None:
        raise ConfigError(f"{args.spec}: host: formulas know machines of their own only; a cluster on one is simulated")
    cells = spec.plan.cells
    demand = demand_of(spec, (args.rate or 1.0) / cells, limits)
    with notes.status("formulas") as status:
        if args.budget:
            trials = most(spec, demand, args.budget / cells, args.seed, status.update)
            demand = demand.at(trials[0].rate)
        else:
            trials = search(spec, demand, args.seed, status.update)
        status.update("replicas that follow the load")
        followed = follow(spec, trials[0], demand, args.seed)
        lines = list(report(spec, demand, trials, command, args.budget and args.budget / cells, followed))
    return lines, {
        "command": command,
        "rate": demand.rate * cells,
        "cells": cells,
        "plans": [_as_data(t) for t in trials],
        "following": followed and _following(followed),
    }


def _following(followed: FollowedLoad) -> dict[str, Any]:
    return {
        "seconds": followed.seconds,
        "usd_per_hour": followed.usd_per_hour,
        "found_s": followed.found,
        "running": [{"role": role, "rig": str(part.rig), "mean": mean} for role, part, mean in followed.running],
    }


def _as_data(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.candidate.label,
        "usd_per_hour": trial.usd,
        "rate": trial.rate,
        "parts": [
            {
                "role": "prefill" if part in trial.candidate.prefill else "decode",
                "instance": part.rig.pool.instance,
                "tp": part.rig.pool.tp,
                "pp": part.rig.pool.pp,
                "replicas": part.count,
                "bottleneck": part.bottleneck,
            }
            for part in trial.candidate.parts
        ],
        "found_s": trial.found,
        "result": trial.result,
    }


if __name__ == "__main__":
    sys.exit(main())
