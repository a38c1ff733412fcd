"""The section `cpu` of docs/performance.md: the measurements of `bench.kernels` beside their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.kernels_isas import is_isa_row, isa_table
from bench.row import Row
from bench.sections import write_section

PICTURE: Final = "performance-cpu.png"
NOTES: Final = Path(__file__).with_name("kernels_notes.md")
"""Notes that no run can produce: where the time goes, and what was tried. Written by hand, part of the section."""


def console_line(row: Row, missing: Sequence[str]) -> str:
    """One line for the terminal. `missing` are the rivals that cannot run here."""
    times = "  ".join(f"{name} {t:.3f}" for name, t in row.ms.items())
    ratios = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.ratios.items())
    traffic = "" if row.gb_per_s is None else f"{row.gb_per_s:.1f} GB/s"
    if row.speeds:
        traffic = "GB/s: " + "  ".join(f"{name} {speed:.2f}" for name, speed in row.speeds.items())
    if row.of_read_bandwidth is not None:
        traffic += f" ({row.of_read_bandwidth:.0%} of read)"
    if row.of_integer_dots is not None:
        traffic += f", {row.of_integer_dots:.0%} of integer dots"
    return (
        f"{row.what:17} {row.shape:38} | ms: {times}"
        + (f" | hack faster: {ratios}" if ratios else "")
        + f" | {traffic}"
        + (f" | not on this processor: {', '.join(missing)}" if row.ratios and missing else "")
    )


def write_report(folder: Path, machine: dict[str, object], rows: Sequence[Row]) -> None:
    """Write table, record and picture. Ratios say how many times faster `hack` is within the same rounds."""
    decode = [row for row in rows if row.what == "attn_decode"]
    prefill = [row for row in rows if row.what == "attn_prefill"]
    fp16 = [row for row in rows if row.what.startswith("codec fp16")]
    isas = [row for row in rows if is_isa_row(row)]
    codecs = [row for row in rows if row.speeds and row not in isas]
    others = [row for row in rows if row not in (*decode, *prefill, *fp16, *codecs, *isas)]
    lines = ["## CPU kernels", "", "`python -m bench.kernels --out docs` · " + describe(machine), ""]
    if decode:
        lines += [
            "| attn_decode, 2 bits | ms | of read speed | of integer dots | BF16 | dequantize | SDPA, group as rows "
            "| SDPA, enable_gqa |",
            "|---|---|---|---|---|---|---|---|",
            "| target | | ≥ 60% | | ≥ 5× | ≥ 2× | | ≥ 30× |",
            *map(decode_line, decode),
            "",
        ]
        draw(decode, folder / PICTURE)
    if prefill:
        lines += ["| attn_prefill | ms | BF16 | SDPA |", "|---|---|---|---|", "| target | | ≥ 1.3× hoped for | ≥ 2× |"]
        lines += [f"| {r.shape} | {r.ms['hack']:.0f} | {ratio(r, 'bf16', 2)} | {best(r, '')} |" for r in prefill] + [""]
    lines += isa_table(isas)
    if fp16:
        lines += ["| codec fp16 | shape | ms | through torch, ms | faster |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.what.removeprefix('codec fp16, ')} | {r.shape} | {r.ms['ours']:.2f} | {r.ms['torch']:.2f} "
            f"| {r.ms['torch'] / r.ms['ours']:.1f}× |"
            for r in fp16
        ] + [""]
    if codecs:
        shapes = [f"{row.what.removeprefix('codecs, ')}, {row.shape}" for row in codecs]
        names = list(dict.fromkeys(name for row in codecs for name in row.speeds))
        lines += [f"| codecs | {' | '.join(shapes)} |", "|---|" + "---|" * len(shapes)]
        lines += [f"| {name} | {' | '.join(speed_of(row, name) for row in codecs)} |" for name in names]
        lines += ["", "GB/s of sealed pages, and of FP16 rows when they are sealed; milliseconds in parentheses.", ""]
    if others:
        lines += ["| others | ms | GB/s |", "|---|---|---|", "| target of seal | | ≥ 2 |"]
        lines += [f"| {r.what}, {r.shape} | {r.ms['hack']:.3f} | {speed(r)} |" for r in others] + [""]
    if decode:
        lines += [f"![decode times]({PICTURE})", ""]
    data = {"machine": machine, "rows": [asdict(row) for row in rows]}
    write_section(folder, "cpu", "\n".join(lines) + "\n" + NOTES.read_text(), data)


def describe(machine: dict[str, object]) -> str:
    """The machine in one line."""
    missing: Sequence[str] = machine["missing_rivals"]  # type: ignore[assignment]
    return (
        "{processor}, {cores} cores, {threads} threads, {isa}, torch {torch}; reads {read_gb_per_s} GB/s; integer dots "
        "{integer_dots_g_per_s} G/s, {of_one_thread} on one thread; load average {load_average}; ".format(**machine)
        + ("real-time priority" if machine["real_time_priority"] else "no real-time priority")
        + (f"; rivals that need AVX-512 BF16 are missing: {', '.join(missing)}" if missing else "")
    )


def decode_line(row: Row) -> str:
    """The table's line for one shape of decode."""
    shares = ("" if share is None else f"{share:.0%}" for share in (row.of_read_bandwidth, row.of_integer_dots))
    ours = (f"{row.ms['hack']:.2f}", *shares, *(ratio(row, name, 1) for name in ("bf16", "dequantize")))
    return "| " + " | ".join((row.shape, *ours, best(row, ", rows"), best(row, ", gqa"))) + " |"


def ratio(row: Row, rival: str, digits: int) -> str:
    """How many times faster we are than a rival, or a note that this processor does not run the rival."""
    return f"{row.ratios[rival]:.{digits}f}×" if rival in row.ratios else "not on this processor"


def best(row: Row, suffix: str) -> str:
    """The ratio to torch's fastest dtype."""
    ratio, name = min(
        (ratio, name) for name, ratio in row.ratios.items() if name.startswith("sdpa") and name.endswith(suffix)
    )
    return f"{ratio:.1f}× ({name.removeprefix('sdpa ').removesuffix(suffix)})"


def speed(row: Row) -> str:
    """GB/s of the row; empty if it has none."""
    return "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"


def speed_of(row: Row, name: str) -> str:
    """GB/s and milliseconds of a contender; empty if the row does not have it."""
    return f"{row.speeds[name]:.2f} ({row.ms[name]:.2f})" if name in row.speeds else ""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw milliseconds of every contender, one panel per shape."""
    figure = Figure(figsize=(3.0 * len(rows), 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    for i, row in enumerate(rows):
        ax = figure.add_subplot(1, len(rows), i + 1)
        bars = ax.barh(list(row.ms), list(row.ms.values()), color=["C0"] + ["C7"] * (len(row.ms) - 1))
        ax.bar_label(bars, fmt="%.2f", fontsize=7)
        ax.set_xscale("log")
        ax.margins(x=0.3)
        ax.invert_yaxis()
        ax.set_title(row.shape, fontsize=8)
        ax.tick_params(labelsize=7, labelleft=i == 0)
        ax.set_xlabel("ms per call", fontsize=8)
    figure.savefig(path, dpi=90)
