"""The summary of outcomes as numbers and as a picture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hackkv.timing import Stage, SubStage
from measure.serve import plot
from measure.serve.calls import PlannedRequest
from measure.serve.client import RequestOutcome
from measure.serve.load import run_load
from measure.serve.report import print_report
from measure.serve.summary import Metric, summarize

VLLM_KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *(f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")),
}


def report() -> dict[str, Any]:
    """Eight stages of 10 ms, of which quantize and approximation take 2 ms."""
    kv = {"codec": "hack", "bytes_by_plane": {"k_codes": 90}, "header_bytes": 10, "fp16_bytes": 400}
    return {"stages": dict.fromkeys(Stage, 0.01), "sub_stages": dict.fromkeys(SubStage, 0.002), "kv": kv}


def outcome(first_s: float, gap_s: float, tokens: int = 5, error: str = "") -> RequestOutcome:
    times = [first_s + index * gap_s for index in range(tokens)]
    call = PlannedRequest(0.0, "x", 10, tokens)
    return RequestOutcome(call, 0.0, 0.0, times, times[-1] + 0.001, 10, tokens, error, None if error else report())


def test_the_keys_are_vllms_and_failures_count_in_none_of_the_times() -> None:
    outcomes = [outcome(0.1, 0.01), outcome(0.3, 0.03), outcome(9.0, 9.0, error="the node died")]
    summary = summarize(outcomes, 2.0, {Metric.TTFT: 150, Metric.TPOT: 20})
    assert summary.keys() >= VLLM_KEYS
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["errors"] == [{"error": "the node died", "count": 1}]
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (20, 10)
    assert (summary["request_throughput"], summary["output_throughput"]) == (1.0, 5.0)
    assert summary["request_goodput"] == 0.5
    assert summary["mean_ttft_ms"] == pytest.approx(200)
    assert summary["std_ttft_ms"] == pytest.approx(100)
    assert summary["median_tpot_ms"] == pytest.approx(20)
    assert summary["p99_e2el_ms"] == pytest.approx(1e3 * (0.141 + 0.99 * 0.28))
    assert summary["stages"]["transfer"]["mean"] == pytest.approx(10)
    assert summary["kv"] == {"codec": "hack", "bytes": 200, "fp16_bytes": 800, "ratio": 0.25}


def test_a_server_without_stages_and_a_run_without_successes_have_numbers_too() -> None:
    alone = outcome(0.1, 0.0, tokens=1)
    alone.report = None
    summary = summarize([alone], 1.0, {})
    assert summary["request_goodput"] is None
    assert (summary["mean_tpot_ms"], summary["mean_itl_ms"]) == (0, 0)
    assert "stages" not in summary
    nothing = summarize([outcome(0.1, 0.1, error="no")], 1.0, {Metric.E2EL: 1e9})
    assert (nothing["completed"], nothing["request_goodput"], nothing["mean_ttft_ms"]) == (0, 0, 0)
    for result in (summary, nothing):
        print_report({"label": "x", "goodput": {}, **result}, Console(quiet=True))


class Slow:
    """A client that answers after a few turns of the event loop, and counts the calls that wait."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def send(self, call: PlannedRequest, fields: dict[str, Any]) -> RequestOutcome:
        """Return an empty outcome."""
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1
        return RequestOutcome(call)


@pytest.mark.parametrize(("limit", "most"), [(None, 9), (4, 4), (1, 1)])
async def test_concurrency_is_held_and_order_kept(limit: int | None, most: int) -> None:
    sender, calls = Slow(), [PlannedRequest(0.0, str(index), 1, 1) for index in range(9)]
    done: list[RequestOutcome] = []
    outcomes, duration_s = await run_load(sender, calls, {}, limit, lambda: None, done.append)
    assert sender.most == most
    assert [each.call for each in outcomes] == calls
    assert len(done) == 9
    assert all(0 <= each.held_s <= duration_s for each in outcomes)


async def test_requests_leave_at_their_times() -> None:
    calls = [PlannedRequest(0.03 * index, "x", 1, 1) for index in range(4)]
    outcomes, _ = await run_load(Slow(), calls, {}, None, lambda: None, lambda _: None)
    assert all(each.sent_s >= each.call.at_s for each in outcomes)


def test_bars_stack_up_to_the_stages_and_the_picture_is_written(tmp_path: Path) -> None:
    paths = []
    for codec in ("fp16", "hack"):
        result = {"label": codec, **summarize([outcome(0.1, 0.01)], 1.0, {})}
        paths.append(tmp_path / f"{codec}.json")
        paths[-1].write_text(json.dumps(result))
    parts = plot.read_run(paths[0]).parts()
    assert sum(parts.values()) == pytest.approx(80)
    assert parts[Stage.PREFILL] == pytest.approx(8)
    assert parts[SubStage.QUANTIZE] == pytest.approx(2)
    assert {part for part, _ in plot.PARTS} == parts.keys()
    out = tmp_path / "jct.png"
    assert plot.main([*map(str, paths), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_result_without_stages_cannot_be_stacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"label": "x", "mean_e2el_ms": 1}')
    assert plot.main([str(path)]) == 2
    assert "other.json: no result of hackkv bench serve with stages" in " ".join(capsys.readouterr().err.split())
