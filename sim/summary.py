"""Statistics of a simulation's rows, under the keys of `vllm bench serve` and of `hackkv bench serve`.

TTFT ends when the client has token 0. TPOT is (JCT - TTFT) / (tokens - 1). Gaps between tokens are known to 1%, as
means of runs of equal steps. Gaps that swaps cause are not included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hackkv.timing import Stage, SubStage
from measure.serve.summary import PERCENTILES
from sim.decode import gap_of
from sim.results import SUB_STAGES, Floats, RequestTable, SimulationRecord
from sim.spec import Objective

WARM_UP: Final = 0.1
"""Share of the requests, counted from the first, that intervals leave out."""
BATCHES: Final = 20
STUDENT_19: Final = 2.093
"""0.975 quantile of Student's distribution with `BATCHES` - 1 degrees of freedom."""
_PILE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95% interval, by batch means."""

    mean: float
    half: float
    """Half of the interval's width; NaN with fewer than two requests per batch."""


def interval(values: Floats) -> Interval:
    """The mean and interval of values in the order of arrival, without the first `WARM_UP` of them."""
    kept = values[int(WARM_UP * len(values)) :]
    if len(kept) < 2 * BATCHES:
        return Interval(float(kept.mean()) if len(kept) else float("nan"), float("nan"))
    means = np.array([batch.mean() for batch in np.array_split(kept, BATCHES)])
    return Interval(float(kept.mean()), float(STUDENT_19 * means.std(ddof=1) / np.sqrt(BATCHES)))


def is_unstable(rows: RequestTable) -> bool:
    """Whether requests still pile up when the last ones arrive. They do if their number in the cluster grows over the
    second half of the arrivals, with 95% confidence and by more than `_PILE` of its mean."""
    ok = rows.ok
    at_s = rows["at_s"][ok]
    ends = np.sort(at_s + rows["e2el_s"][ok])
    inside = np.arange(1, len(at_s) + 1) - np.searchsorted(ends, at_s)
    half = len(at_s) // 2
    if half < BATCHES:
        return False
    x = np.array([batch.mean() for batch in np.array_split(at_s[half:], BATCHES)])
    y = np.array([batch.mean() for batch in np.array_split(inside[half:], BATCHES)])
    spread = float(np.sum((x - x.mean()) ** 2))
    if not spread:
        return False
    slope = float(np.sum((x - x.mean()) * (y - y.mean())) / spread)
    residual = y - y.mean() - slope * (x - x.mean())
    error = float(np.sqrt(np.sum(residual**2) / (BATCHES - 2) / spread))
    return slope - STUDENT_19 * error > 0 and slope * float(x[-1] - x[0]) > _PILE * float(inside.mean())


def good(rows: RequestTable, slo: Objective) -> npt.NDArray[np.bool_]:
    """Which requests were served and kept all limits."""
    kept = rows.ok.copy()
    for name, limit in slo.limits.items():
        values = 1e3 * rows[f"{name}_s"]
        kept &= np.isnan(values) | (values <= limit)
    return kept


def summarize(record: SimulationRecord, label: str = "") -> dict[str, Any]:
    """The contents of `result.json`."""
    rows, spec = record.rows, record.spec
    ok = rows.ok
    inputs, outputs = rows["input_length"][ok].sum(), rows["output_length"][ok].sum()
    ends = rows["at_s"] + rows["e2el_s"]
    duration = float(np.nanmax(ends)) if rows.filled else 0.0
    span = max(duration, 1e-12)
    codec = spec.codec.name
    summary: dict[str, Any] = {
        "label": label or codec,
        "backend": "simulated",
        "model_id": spec.model if isinstance(spec.model, str) else "custom",
        "num_prompts": len(ok),
        "duration": duration,
        "completed": int(ok.sum()),
        "failed": int(len(ok) - ok.sum()),
        "total_input_tokens": int(inputs),
        "total_output_tokens": int(outputs),
        "request_throughput": int(ok.sum()) / span,
        "goodput": spec.slo.limits,
        "request_goodput": int(good(rows, spec.slo).sum()) / span if spec.slo.limits else None,
        "attainment": float(good(rows, spec.slo).mean()) if spec.slo.limits else None,
        "output_throughput": float(outputs) / span,
        "total_token_throughput": float(inputs + outputs) / span,
    }
    for metric in ("ttft", "tpot", "e2el"):
        values = 1e3 * rows[f"{metric}_s"][ok]
        summary |= {f"{name}_{metric}_ms": value for name, value in statistics(values[~np.isnan(values)]).items()}
        within = interval(values[~np.isnan(values)])
        summary[f"mean_{metric}_ms_95"] = [within.mean - within.half, within.mean + within.half]
    summary |= {f"{name}_itl_ms": value for name, value in _gaps(record).items()}
    summary["stages"] = {str(stage): statistics(1e3 * rows[f"{stage}_s"][ok]) for stage in Stage}
    summary["sub_stages"] = {
        str(part): statistics(1e3 * rows[f"{part}_s"][ok] if part in SUB_STAGES else np.zeros(0)) for part in SubStage
    }
    moved, fp16 = float(rows["wire_bytes"][ok].sum()), float(inputs) * spec.shape.kv_bytes
    summary["kv"] = {"codec": codec, "bytes": moved, "fp16_bytes": fp16, "ratio": moved / fp16 if fp16 else None}
    summary["errors"] = [
        {"error": error, "count": count} for error, count in Counter(rows.errors.values()).most_common()
    ]
    return {**summary, **_fleet(record, span), "unstable": is_unstable(rows), "events": record.events}


def _fleet(record: SimulationRecord, span: float) -> dict[str, Any]:
    """Use and cost of the replicas."""
    rows = record.rows
    usd = _usd(record, span)
    tokens = float(rows["output_length"][rows.ok].sum())
    served = int(rows.ok.sum())
    prefills, decodes = record.prefills, record.decodes
    return {
        "usd_per_hour": usd / span * 3600,
        "usd_per_request": usd / served if served else None,
        "usd_per_1m_output_tokens": 1e6 * usd / tokens if tokens else None,
        "prefill_busy": _mean([each.busy_s / span for each in prefills]),
        "decode_busy": _mean([each.busy_s / span for each in decodes]),
        "decode_batch": _ratio(sum(each.tokens for each in decodes), sum(each.steps for each in decodes)),
        "pages_used": _mean([each.page_seconds / span / each.pages for each in decodes]),
        "pages_peak": max((each.peak_pages / each.pages for each in decodes), default=0.0),
        "link_used": max(record.links_s, default=0.0) / span,
        "pools": _pools(record, span),
        "swaps": int(sum(each.swaps for each in decodes)),
        "failovers": int(np.nansum(rows["failovers"])),
        "cached_tokens": int(np.nansum(rows["cached_tokens"])),
    }


def _pools(record: SimulationRecord, span: float) -> list[dict[str, Any]]:
    """Work of the replicas of each pool: tokens that were computed or chosen, and the busy share of the time."""
    rows = []
    for role, pools in record.spec.roles.items():
        tallies = record.prefills if role == "prefill" else record.decodes
        for kind, pool in enumerate(pools):
            own = [tally for tally in tallies if tally.kind == kind]
            rows.append(
                {
                    "role": role,
                    "instance": pool.instance,
                    "tp": pool.tp,
                    "pp": pool.pp,
                    "replicas": pool.replicas,
                    "busy": _mean([tally.busy_s / span for tally in own]),
                    "tokens": sum(tally.tokens for tally in own),
                }
            )
    return rows


def _usd(record: SimulationRecord, span: float) -> float:
    """Dollars for all replicas while they ran."""
    spec, usd = record.spec, 0.0
    for role, pools in spec.roles.items():
        for index, pool in enumerate(pools):
            ran_s = record.paid_s.get(spec.key_of(role, index), pool.replicas * span)
            usd += ran_s / 3600 * spec.usd_of(pool)
    return usd


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratio(count: float, of: float) -> float:
    return count / of if of else 0.0


def statistics(values: Floats) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, named as in `measure.serve.summary`; zeros without values."""
    if not len(values):
        return dict.fromkeys(("mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES)), 0.0)
    percentiles = zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
        **{f"p{percent}": float(value) for percent, value in percentiles},
    }


def _gaps(record: SimulationRecord) -> dict[str, float]:
    """Statistics of the time between two tokens, in milliseconds."""
    gaps: Counter[int] = Counter()
    for tally in record.decodes:
        gaps.update(tally.gaps)
    steps = sorted(gaps)
    values = 1e3 * np.array([gap_of(step) for step in steps])
    weights = np.array([gaps[step] for step in steps], dtype=np.float64)
    if not len(values):
        return statistics(values)
    mean = float(np.average(values, weights=weights))
    below = np.cumsum(weights) / weights.sum()
    at = {percent: float(values[int(np.searchsorted(below, percent / 100))]) for percent in PERCENTILES}
    std = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    return {"mean": mean, "median": at[50], "std": std, **{f"p{percent}": at[percent] for percent in PERCENTILES}}
