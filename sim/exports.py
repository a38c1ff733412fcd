"""A simulation as files that other programs read: CSV, Chrome trace, Prometheus text, pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from hackkv.timing import Stage
from router.watch.metrics import SECONDS, TOKENS
from sim.results import COLUMNS, SUB_STAGES, Floats, SimulationRecord


def write_csv(record: SimulationRecord, path: Path) -> None:
    """One line for each request, in the order of the trace."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("request", *COLUMNS))
        for number, row in enumerate(record.rows.table):
            writer.writerow((number, *("" if np.isnan(value) else f"{value:.9g}" for value in row)))


def write_chrome_trace(record: SimulationRecord, path: Path) -> None:
    """Write a file for chrome://tracing and Perfetto: a row per replica (passes, steps) and per request (stages)."""
    events: list[dict[str, Any]] = []
    rows = {name: index for index, name in enumerate(dict.fromkeys(span.node for span in record.spans))}
    for span in record.spans:
        detail = {"tokens" if span.what == "pass" else "batch": span.detail}
        events.append(_event("replicas", rows[span.node], span.what, (span.began, span.ended), detail))
    events += [
        {"ph": "M", "pid": "replicas", "tid": index, "name": "thread_name", "args": {"name": name}}
        for name, index in rows.items()
    ]
    for job in record.jobs:
        for stage, began, ended in job.times.marks or ():
            events.append(_event("requests", job.number, str(stage), (began, ended), {}))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _event(process: str, thread: int, name: str, when: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    began, ended = (1e6 * each for each in when)
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": began, "dur": ended - began, "args": args}


class Series:
    """A simulation under the names of the router's metrics (`router.watch.metrics`), so that its dashboards show it."""

    def __init__(self, record: SimulationRecord) -> None:
        self._record = record

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`."""
        rows, spec = self._record.rows, self._record.spec
        ok, codec = rows.ok, spec.codec.name
        model = spec.model if isinstance(spec.model, str) else "custom"
        stages = HistogramMetricFamily(
            "hackkv_request_stage_seconds", "Time of one sequence in each stage, in seconds.", labels=["codec", "stage"]
        )
        for stage in Stage:
            stages.add_metric([codec, stage], *_buckets(rows[f"{stage}_s"][ok], SECONDS))
        yield stages
        parts = HistogramMetricFamily(
            "hackkv_request_substage_seconds", "Parts of stages, in seconds.", labels=["stage"]
        )
        for part in SUB_STAGES:
            parts.add_metric([part], *_buckets(rows[f"{part}_s"][ok], SECONDS))
        yield parts
        for name, column, bounds in (
            ("time_to_first_token_seconds", "ttft_s", SECONDS),
            ("request_time_per_output_token_seconds", "tpot_s", SECONDS),
            ("e2e_request_latency_seconds", "e2el_s", SECONDS),
            ("request_prefill_time_seconds", "prefill_s", SECONDS),
            ("request_decode_time_seconds", "decode_s", SECONDS),
            ("request_prompt_tokens", "input_length", TOKENS),
            ("request_generation_tokens", "output_length", TOKENS),
        ):
            values = rows[column][ok]
            family = HistogramMetricFamily(f"vllm:{name}", f"Column {column} of a simulation.", labels=["model_name"])
            family.add_metric([model], *_buckets(values[~np.isnan(values)], bounds))
            yield family
        requests = CounterMetricFamily("hackkv_requests", "Sequences that ended, by outcome.", labels=["outcome"])
        requests.add_metric(["length"], float(ok.sum()))
        requests.add_metric(["failed"], float(len(ok) - ok.sum()))
        yield requests
        moved = CounterMetricFamily("hackkv_kv_transfer_bytes", "KV on the wire (bytes).", labels=["codec", "plane"])
        moved.add_metric([codec, "all"], float(np.nansum(rows["wire_bytes"])))
        yield moved
        fp16 = CounterMetricFamily("hackkv_kv_transfer_fp16_bytes", "The same as FP16 (bytes).", labels=["codec"])
        fp16.add_metric([codec], float(rows["input_length"][ok].sum()) * spec.shape.kv_bytes)
        yield fp16


def _buckets(values: Floats, bounds: tuple[float, ...]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound, and the sum."""
    ordered = np.sort(values)
    counts = [(str(float(bound)), float(np.searchsorted(ordered, bound, side="right"))) for bound in bounds]
    return [*counts, ("+Inf", float(len(ordered)))], float(ordered.sum())


def write_prometheus(record: SimulationRecord, path: Path) -> None:
    """Write the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Series(record))
    path.write_bytes(generate_latest(registry))


def can_draw() -> bool:
    """Whether the package that draws is installed."""
    return find_spec("matplotlib") is not None
