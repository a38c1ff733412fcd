"""`hackkv simulate SPEC.yaml`: run a cluster that nobody has bought yet.

Writes result.json (keys of `vllm bench serve`, stages, goodput, cost), requests.csv, metrics.prom (for the same
dashboards), trace.json (with --chrome-trace) and pictures. Without --trace, requests are synthetic, as `load` says.
docs/plan.md has examples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hackkv.errors import HackkvError
from hackkv.timing import Stage
from sim.cluster import Options
from sim.exports import can_draw, write_chrome_trace, write_csv, write_prometheus
from sim.results import SimulationRecord
from sim.shards import simulate
from sim.spec import read_spec
from sim.summary import summarize
from sim.workload import read_trace, synthetic

_SHOWN_EVERY = 100
_LONGEST_TRACE = 20_000
"""A trace of more requests is too large for a viewer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, run, write; returns the exit code: 1 if a request failed, 2 if something cannot be used."""
    args = _parser().parse_args(arguments)
    notes = Console(stderr=True, highlight=False)
    try:
        result = _run(args, notes)
    except HackkvError as error:
        notes.print(f"hackkv simulate: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    print_result(result, Console(highlight=False))
    notes.print(f"wrote {args.out}", markup=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hackkv simulate", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml", help="the cluster")
    parser.add_argument("--trace", type=Path, help="requests: JSONL of Mooncake or our own, CSV of Azure or Splitwise")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and noise")
    parser.add_argument("--out", type=Path, default=Path("simulated"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--label", default="", help="name of the run in tables and plots; default: the codec")
    parser.add_argument(
        "--processes", type=int, default=1, help="routers (policy.shards) simulated at once; default: 1"
    )
    parser.add_argument("--chrome-trace", action="store_true", help="also write trace.json, for chrome://tracing")
    return parser


def _run(args: argparse.Namespace, notes: Console) -> dict[str, Any]:
    spec = read_spec(args.spec)
    arrivals = read_trace(args.trace) if args.trace else synthetic(spec.load, args.seed)
    if args.chrome_trace and len(arrivals) > _LONGEST_TRACE:
        notes.print(f"--chrome-trace: {len(arrivals)} requests make a file that no viewer opens", style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        bar = progress.add_task("requests", total=len(arrivals))

        def on_over(count: int) -> None:
            if count % _SHOWN_EVERY == 0:
                progress.update(bar, completed=count)

        began = perf_counter()
        options = Options(seed=args.seed, keep_spans=args.chrome_trace, on_over=on_over)
        record = simulate(spec, arrivals, options, args.processes)
    result = summarize(record, args.label) | {
        "seed": args.seed,
        "requests": str(args.trace or spec.load.shape),
        "wall_s": perf_counter() - began,
    }
    write(record, result, args.out, chrome_trace=args.chrome_trace)
    return result


def write(record: SimulationRecord, result: dict[str, Any], folder: Path, *, chrome_trace: bool = False) -> None:
    """Write all results of a run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "result.json"
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    write_csv(record, folder / "requests.csv")
    write_prometheus(record, folder / "metrics.prom")
    if chrome_trace:
        write_chrome_trace(record, folder / "trace.json")
    if can_draw() and result["completed"]:
        import_module("sim.pictures").draw_run(record.rows, path, folder)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print the most important numbers of a result."""
    table = Table("simulated", "", title=result["label"], title_justify="left")
    table.columns[1].justify = "right"
    rows = [
        ("completed / failed", f"{result['completed']:,} / {result['failed']:,}"),
        ("duration, s", f"{result['duration']:,.1f}"),
        ("requests / s", f"{result['request_throughput']:.3f}"),
        ("output tokens / s", f"{result['output_throughput']:,.0f}"),
        ("TTFT mean / p90, ms", f"{result['mean_ttft_ms']:,.0f} / {result['p90_ttft_ms']:,.0f}"),
        ("TPOT mean / p90, ms", f"{result['mean_tpot_ms']:,.1f} / {result['p90_tpot_ms']:,.1f}"),
        ("JCT mean / p90, ms", f"{result['mean_e2el_ms']:,.0f} / {result['p90_e2el_ms']:,.0f}"),
        *((f"  {stage}", f"{result['stages'][stage]['mean']:,.1f}") for stage in map(str, Stage)),
        ("prefill / decode busy", f"{result['prefill_busy']:.0%} / {result['decode_busy']:.0%}"),
        ("pages at peak, busiest link", f"{result['pages_peak']:.0%}, {result['link_used']:.0%}"),
        ("$ / request, $ / 1M output tokens", _dollars(result)),
    ]
    if result["attainment"] is not None:
        rows.insert(4, ("good requests / s, share", f"{result['request_goodput']:.3f}, {result['attainment']:.1%}"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if result["unstable"]:
        console.print("waits still grow at the end: the load is more than the cluster serves", style="yellow")
    for failure in result["errors"]:
        console.print(f"{failure['count']} failed: {failure['error']}", style="red", markup=False, soft_wrap=True)


def _dollars(result: dict[str, Any]) -> str:
    if result["usd_per_request"] is None:
        return "-"
    return f"{result['usd_per_request']:.4f}, {result['usd_per_1m_output_tokens']:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
