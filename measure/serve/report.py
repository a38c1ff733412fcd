"""The numbers of a run, on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from measure.serve.summary import Metric

_NAMES = {
    Metric.TTFT: "to first token",
    Metric.TPOT: "per token after it",
    Metric.ITL: "between chunks",
    Metric.E2EL: "end to end, JCT",
}
_COLUMNS = ("mean", "median", "std", "p90", "p99")


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print throughput, latencies, stages, bytes and errors."""
    console.print(_throughput(result))
    if result["completed"]:
        latencies = {
            f"{metric}: {name}": {column: result[f"{column}_{metric}_ms"] for column in _COLUMNS}
            for metric, name in _NAMES.items()
        }
        console.print(_times("latency, ms", latencies))
    if "stages" in result:
        parts = {f"  of it {name}": times for name, times in result["sub_stages"].items()}
        console.print(_times("job completion time by stage, ms", {**result["stages"], **parts}))
    for failure in result["errors"]:
        console.print(f"{failure['count']} failed: {failure['error']}", style="red", markup=False, soft_wrap=True)


def _throughput(result: dict[str, Any]) -> Table:
    table = Table("Serving Benchmark Result", "", title=result["label"], title_justify="left")
    table.columns[1].justify = "right"
    rows = [
        ("completed", f"{result['completed']:,}"),
        ("failed", f"{result['failed']:,}"),
        ("duration, s", f"{result['duration']:.2f}"),
        ("input tokens", f"{result['total_input_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
        ("requests / s", f"{result['request_throughput']:.2f}"),
        ("output tokens / s", f"{result['output_throughput']:.1f}"),
        ("all tokens / s", f"{result['total_token_throughput']:.1f}"),
        ("held back here, p99 ms", f"{result['p99_held_ms']:.1f}"),
    ]
    if result["request_goodput"] is not None:
        limits = ", ".join(f"{metric} <= {limit:g} ms" for metric, limit in result["goodput"].items())
        rows.insert(6, (f"good requests / s ({limits})", f"{result['request_goodput']:.2f}"))
    if result.get("kv", {}).get("fp16_bytes"):
        kv = result["kv"]
        rows.append((f"KV moved as {kv['codec']}, MB", f"{kv['bytes'] / 1e6:.2f}"))
        rows.append(("  share of FP16", f"{kv['ratio']:.3f}"))
    for row in rows:
        table.add_row(*row)
    return table


def _times(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table("", *_COLUMNS, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in rows.items():
        table.add_row(name, *(f"{times[column]:.2f}" for column in _COLUMNS), style="dim" if name[0] == " " else "")
    return table
