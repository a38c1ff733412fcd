"""The output of `bench.peers`: sections of docs/performance.md, their numbers, and one picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.peers.model import SHAPE
from bench.peers.ours import Run, middle
from hackkv.defaults import DEFAULT_CODEC
from hackkv.timing import Stage
from measure.accuracy.machine import this_machine

PICTURE: Final = "performance-codecs.png"
TARGETS: Final = {"llama.cpp KV f16": 0.5, "llama.cpp KV f16-plain": 0.5, "llama.cpp KV q4_0": 0.1}
"""Targets: `hack` takes at most this share of the peer's time."""


PAPER: Final = "hack-paper"
ABLATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    f"{PAPER} without SE": {"name": PAPER, "settings": {"stored_sums": False}},
    f"{PAPER} without RQE": {"name": PAPER, "settings": {"open_page": "requantize"}},
}
"""The ablations of the paper's Fig. 13."""
CODECS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"name": name} for name in ("fp16", DEFAULT_CODEC, "hack", PAPER)},
    **ABLATIONS,
}
"""Name in the table -> codec with its settings."""
ABOUT_ABLATIONS: Final = """SE and RQE are the paper's summation elimination and requantization elimination. Without SE,
sums of codes are counted where they are read. Without RQE, every row joins the codes of its page at once, and V's codes
there are dequantized and quantized again with each token (csrc/requantize.h); the paper's Fig. 13 has JCT 1.14 to 1.26
times as long without SE, 1.001 to 1.22 times without RQE. Ours differs in two ways, both for `hack-paper`'s open page:
its V is attended to in FP16 in prefill as well, where a query without RQE sees codes only, so compare the decode
stages; and its K is quantized where it is read, for all rows of the open page at each token, where without RQE a row of
K is quantized once. What RQE is for is accuracy: docs/accuracy.md has both."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One request to one system; `version` is the system's."""

    jct_s: float
    prefill_s: float
    per_token_s: float
    version: str


def about(what: str, threads: int) -> dict[str, Any]:
    """The model, machine and requests to which the numbers belong."""
    machine = this_machine("cpu", threads)
    shape = f"{SHAPE.layers} layers, hidden {SHAPE.hidden}, {SHAPE.heads}/{SHAPE.kv_heads} heads x {SHAPE.head_dim}"
    return {
        "requests": what,
        "model": f"random, {shape}, FFN {SHAPE.ffn}, vocabulary {SHAPE.vocab}, BF16",
        "machine": f"{machine.cpu}, {machine.cores} cores, {threads} compute threads a process, torch {machine.torch}",
    }


def peers_section(about: Mapping[str, Any], timings: Mapping[str, Sequence[Timing]]) -> tuple[str, dict[str, Any]]:
    """The page's section and its record. Times are medians."""
    rows = {system: _median(each) for system, each in timings.items()}
    ours = rows.get("hackkv hack")
    lines = ["## Against llama.cpp", "", f"`make peers` · {_line(about)}", ""]
    lines += ["| system | runs | JCT s | prefill s | ms per token | JCT of hack / its JCT | target |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for system, row in rows.items():
        ratio = f"{ours.jct_s / row.jct_s:.2f}" if ours else ""
        target = f"≤ {TARGETS[system]}" if system in TARGETS else ""
        cells = f"{row.jct_s:.2f} | {row.prefill_s:.2f} | {1e3 * row.per_token_s:.1f} | {ratio} | {target}"
        lines.append(f"| {system} ({row.version}) | {len(timings[system])} | {cells} |")
    lines += ["", "hackkv answers through HTTP, router and wire, with prefill and decode node on the same cores; "]
    lines[-1] += (
        "llama.cpp is called in one process, with flash attention, which quantized KV needs, and without it (plain)."
    )
    record = {system: [asdict(timing) for timing in each] for system, each in timings.items()}
    return "\n".join(lines), {**about, "load_average": os.getloadavg()[1], "timings": record}


def codecs_section(
    folder: Path | None, about: Mapping[str, Any], results: Mapping[int, Mapping[str, Sequence[Run]]]
) -> tuple[str, dict[str, Any]]:
    """The page's section and its record. Each row is the run of median JCT. The picture is drawn into `folder`."""
    chosen = {size: {name: middle(runs) for name, runs in each.items()} for size, each in results.items() if each}
    runs = [run for each in chosen.values() for run in each.values()]
    stages = [stage for stage in Stage if any(run.stages[stage] >= 0.0005 for run in runs)]
    lines = ["## Codecs, by stage", "", f"`python -m bench.peers codecs --out docs` · {_line(about)}", ""]
    lines += ["| prompt | codec | runs | JCT s | JCT / fp16 | " + " | ".join(stages) + " | bytes / FP16 |"]
    lines += ["|---|---|---|---|---|" + "---|" * (len(stages) + 1)]
    for size, each in chosen.items():
        exact = each.get("fp16")
        for name, run in each.items():
            ratio = f"{run.jct_s / exact.jct_s:.2f}" if exact else ""
            spent = " | ".join(f"{run.stages[stage]:.3f}" for stage in stages)
            counts = f"{len(results[size][name])} | {run.jct_s:.2f} | {ratio}"
            lines.append(f"| {size} | {name} | {counts} | {spent} | {run.wire_bytes / run.fp16_bytes:.3f} |")
    lines += ["", "Seconds; the stages of a row sum to its JCT.", "", *_ablations(chosen)]
    if folder and chosen:
        _draw(chosen, stages, folder / PICTURE)
        lines += ["", f"![JCT by stage]({PICTURE})"]
    record = {
        str(size): {name: [run.as_json() for run in r] for name, r in each.items()} for size, each in results.items()
    }
    return "\n".join(lines), {**about, "load_average": os.getloadavg()[1], "results": record}


def _ablations(chosen: Mapping[int, Mapping[str, Run]]) -> list[str]:
    """A table of each ablation's time over that of `hack-paper`, and an explanation of the ratios."""
    lines = [f"| prompt | codec | JCT / {PAPER} | prefill / {PAPER} | decode / {PAPER} |", "|---|---|---|---|---|"]
    for size, each in chosen.items():
        for name in ABLATIONS:
            if PAPER in each and name in each:
                run, whole = each[name], each[PAPER]
                ratios = [run.jct_s / whole.jct_s]
                ratios += [run.stages[stage] / whole.stages[stage] for stage in (Stage.PREFILL, Stage.DECODE)]
                lines.append(f"| {size} | {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return [*lines, "", ABOUT_ABLATIONS.replace("\n", " ")]


def _median(timings: Sequence[Timing]) -> Timing:
    jct, prefill, token = (
        median(getattr(timing, name) for timing in timings) for name in ("jct_s", "prefill_s", "per_token_s")
    )
    return Timing(jct, prefill, token, timings[0].version)


def _line(about: Mapping[str, Any]) -> str:
    return f"{'; '.join(about.values())}; load average {os.getloadavg()[1]:.1f}"


def _draw(chosen: Mapping[int, Mapping[str, Run]], stages: Sequence[Stage], path: Path) -> None:
    """Draw stacked bars, one panel per prompt length."""
    figure = Figure(figsize=(4.0 * len(chosen), 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (size, each) in enumerate(chosen.items()):
        ax = figure.add_subplot(1, len(chosen), index + 1)
        ends = [0.0] * len(each)
        for stage in stages:
            widths = [run.stages[stage] for run in each.values()]
            ax.barh(list(each), widths, left=ends, label=stage)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        ax.invert_yaxis()
        ax.set_title(f"{size} tokens", fontsize=8)
        ax.set_xlabel("JCT, s", fontsize=8)
        ax.tick_params(labelsize=7)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=len(stages), fontsize=7)
    figure.savefig(path, dpi=90)
