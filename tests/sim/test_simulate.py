"""`hackkv simulate`: files, numbers and errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hackkv.timing import Stage
from measure.serve.plot import read_run
from sim.results import RequestTable
from sim.simulate import main
from sim.summary import interval, is_unstable, summarize
from sim.workload import synthetic
from tests.sim.clusters import run, small

SPEC = """
model: mistral-7b
prefill: {instance: g5.12xlarge, replicas: 2, tp: 4}
decode: {instance: p4de.24xlarge, replicas: 1}
slo: {ttft: 3000, tpot: 50}
load: {shape: arxiv, rate: 1.0, requests: 80}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that one run wrote."""
    place = tmp_path_factory.mktemp("run")
    (place / "spec.yaml").write_text(SPEC)
    assert main([str(place / "spec.yaml"), "--out", str(place / "out"), "--chrome-trace", "--label", "mine"]) == 0
    return place / "out"


def test_the_result_has_the_keys_of_bench_serve(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert result["completed"] == 80
    for key in ("request_throughput", "output_throughput", "p99_itl_ms", "median_tpot_ms", "std_e2el_ms"):
        assert result[key] > 0
    parts = sum(result["stages"][stage]["mean"] for stage in map(str, Stage))
    assert parts == pytest.approx(result["mean_e2el_ms"], rel=1e-9)
    assert 0 < result["request_goodput"] <= result["request_throughput"]
    assert result["attainment"] == pytest.approx(result["request_goodput"] / result["request_throughput"])
    assert result["usd_per_request"] == pytest.approx(result["usd_per_hour"] * result["duration"] / 3600 / 80)
    run = read_run(folder / "result.json")
    assert run.label == "mine"
    assert sum(run.parts().values()) == pytest.approx(run.mean_e2el_ms)


def test_every_request_has_a_line(folder: Path) -> None:
    with (folder / "requests.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["request"] for line in lines] == [str(number) for number in range(80)]
    for line in lines:
        parts = sum(float(line[f"{stage}_s"]) for stage in Stage)
        assert parts == pytest.approx(float(line["e2el_s"]), rel=1e-6)


def test_the_trace_holds_every_stage_of_every_request(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    with (folder / "requests.csv").open() as file:
        whole = {line["request"]: float(line["e2el_s"]) for line in csv.DictReader(file)}
    spent = dict.fromkeys(whole, 0.0)
    for event in events:
        if event["pid"] == "requests":
            spent[str(event["tid"])] += event["dur"] / 1e6
    assert spent == pytest.approx(whole, rel=1e-6)
    assert {event["name"] for event in events if event["pid"] == "replicas"} == {"pass", "step", "thread_name"}


def test_the_metrics_are_those_of_the_router(folder: Path) -> None:
    families = {family.name: family for family in text_string_to_metric_families((folder / "metrics.prom").read_text())}
    samples = families["hackkv_request_stage_seconds"].samples
    count = {sample.labels["stage"]: sample.value for sample in samples if sample.name.endswith("_count")}
    total = sum(sample.value for sample in samples if sample.name.endswith("_sum"))
    assert count == dict.fromkeys(map(str, Stage), 80.0)
    result = json.loads((folder / "result.json").read_text())
    assert total == pytest.approx(80 * result["mean_e2el_ms"] / 1e3)
    assert "vllm:time_to_first_token_seconds" in families


def test_pictures_are_drawn(folder: Path) -> None:
    assert (folder / "stages.png").stat().st_size > 1000
    assert (folder / "times.png").stat().st_size > 1000


def test_a_trace_may_take_the_place_of_the_load(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,100,5\n1.0,200,6\n")
    out = tmp_path / "out"
    assert main([str(tmp_path / "spec.yaml"), "--trace", str(tmp_path / "t.csv"), "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["total_output_tokens"] == 11
    assert not (out / "trace.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [(SPEC.replace("mistral-7b", "mistral"), "did you mean"), (SPEC + "x: 1", "x: there is no such setting")],
)
def test_errors_name_the_file(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    assert main([str(tmp_path / "spec.yaml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "spec.yaml" in said
    assert words in said


@pytest.mark.parametrize(("rate", "unstable"), [(0.5, False), (30.0, True)])
def test_too_much_load_is_flagged(rate: float, unstable: bool) -> None:
    spec = small(load={"shape": "arxiv", "rate": rate, "requests": 400})
    outcome = run(spec, synthetic(spec.load, 0))
    assert is_unstable(outcome.rows) is unstable
    assert summarize(outcome.record)["unstable"] is unstable


def test_an_interval_covers_the_mean_of_noise() -> None:
    rng = np.random.default_rng(0)
    within = [interval(rng.normal(5.0, 1.0, 400)) for _ in range(200)]
    covered = [abs(one.mean - 5.0) <= one.half for one in within]
    assert 0.9 <= np.mean(covered) <= 0.99


def test_no_rows_give_no_interval() -> None:
    assert np.isnan(interval(np.zeros(0)).mean)
    assert RequestTable(range(0)).filled == 0
