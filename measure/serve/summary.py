"""Statistics of outcomes, under the keys of `vllm bench serve` and some of our own.

Two differences from vLLM are deliberate. `e2el` lasts until the end of the stream, as do the client's wait and the sum
of our stages. `failed` also counts streams that break off or carry an error after a status of 200.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from hackkv.timing import Stage, SubStage
from measure.serve.client import RequestOutcome

PERCENTILES = (50, 90, 95, 99)


class Metric(StrEnum):
    """Metrics of a request, in milliseconds."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"
    E2EL = "e2el"


def of_request(outcome: RequestOutcome, metric: Metric) -> list[float]:
    """A request's values of a metric, in seconds; empty if it has none."""
    match metric:
        case Metric.TTFT:
            return [outcome.ttft_s]
        case Metric.TPOT:
            return [] if outcome.tpot_s is None else [outcome.tpot_s]
        case Metric.ITL:
            return outcome.itl_s
        case Metric.E2EL:
            return [outcome.e2e_s]


def is_good(outcome: RequestOutcome, limits: Mapping[Metric, float]) -> bool:
    """Whether a request kept all `limits`, in milliseconds."""
    return outcome.ok and all(
        1e3 * value <= limit for metric, limit in limits.items() for value in of_request(outcome, metric)
    )


def summarize(outcomes: Sequence[RequestOutcome], duration_s: float, limits: Mapping[Metric, float]) -> dict[str, Any]:
    """The numbers of a run. Latencies cover requests that completed; a metric without values has zeros."""
    done = [outcome for outcome in outcomes if outcome.ok]
    inputs, outputs = sum(each.prompt_tokens for each in done), sum(each.output_tokens for each in done)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(is_good(each, limits) for each in done) / duration_s if limits else None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
    }
    for metric in Metric:
        values = [1e3 * value for outcome in done for value in of_request(outcome, metric)]
        summary |= {f"{name}_{metric}_ms": value for name, value in _statistics(values).items()}
    held = _statistics([1e3 * outcome.held_s for outcome in outcomes])
    summary |= {f"{name}_held_ms": held[name] for name in ("mean", "p99")}
    summary |= _account([outcome.report for outcome in done if outcome.report])
    errors = Counter(outcome.error for outcome in outcomes if not outcome.ok)
    summary["errors"] = [{"error": error, "count": count} for error, count in errors.most_common()]
    return summary


def details(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """The lists that vLLM saves with `--save-detailed`, in the order of sending; times in seconds."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "ttfts": [outcome.ttft_s if outcome.token_s else None for outcome in outcomes],
        "itls": [outcome.itl_s for outcome in outcomes],
        "e2els": [outcome.e2e_s for outcome in outcomes],
        "errors_by_request": [outcome.error for outcome in outcomes],
        "reports": [outcome.report for outcome in outcomes],
    }


def _statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles; zeros without values."""
    if not values:
        return dict.fromkeys(("mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES)), 0.0)
    array = np.array(values)
    percentiles = zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "std": float(array.std()),
        **{f"p{percent}": float(value) for percent, value in percentiles},
    }


def _account(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stages in milliseconds and bytes of KV, as our router reports them; empty without reports."""
    if not reports:
        return {}
    moved = sum(sum(report["kv"]["bytes_by_plane"].values()) + report["kv"]["header_bytes"] for report in reports)
    fp16 = sum(report["kv"]["fp16_bytes"] for report in reports)
    return {
        "stages": {
            stage: _statistics([1e3 * report["stages"][stage] for report in reports]) for stage in map(str, Stage)
        },
        "sub_stages": {
            stage: _statistics([1e3 * report["sub_stages"][stage] for report in reports])
            for stage in map(str, SubStage)
        },
        "kv": {
            "codec": reports[0]["kv"]["codec"],
            "bytes": moved,
            "fp16_bytes": fp16,
            "ratio": moved / fp16 if fp16 else None,
        },
    }
