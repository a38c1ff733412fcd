"""`hackkv plan`: objectives, formulas, search, page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hackkv.errors import ConfigError
from sim.plan.__main__ import main
from sim.plan.objective import Limit, parse
from sim.plan.region import share_costs, winner
from sim.plan.screen import ServiceTarget, best_batch, candidates, demand_of, prefill_part, rigs
from sim.plan.search import most, search, settle, try_out
from sim.spec import Choices, Codec, Host, Load, ReplicaPool, Spec, read_spec

LIMITS = parse("ttft_p90=2s,tpot_p90=60ms")
SPEC = """
model: mistral-7b
prefill: {instance: g5.12xlarge, replicas: 1, chunk_tokens: 4096}
decode: {instance: p4de.24xlarge, replicas: 1}
load: {input_len: 4000, output_len: 100}
plan: {tp: [1, 4], pp: [1], codecs: [{name: fp16}, {name: rot-k4v4}]}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """The specification of a small plan."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    return read_spec(tmp_path / "spec.yaml")


def test_limits() -> None:
    assert parse("ttft_p90=2s, tpot_p99=50ms") == (Limit("ttft", 90, 2.0), Limit("tpot", 99, 0.05))


@pytest.mark.parametrize(
    "text", ["", "ttft=2s", "ttft_p90=2", "itl_p90=2s", "ttft_p0=2s", "ttft_p90=0s", "ttft_p90=-2s"]
)
def test_what_is_no_limit_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse(text)


def test_rigs_stay_on_their_instance(spec: Spec) -> None:
    wide = spec.model_copy(update={"plan": Choices(tp=(4, 8), pp=(1, 3))})
    found = [(rig.pool.tp, rig.pool.pp) for rig in rigs(wide, wide.decode[0], ("g5.12xlarge",), Codec())]
    assert found == [(4, 1)]


def test_a_model_that_does_not_fit_has_no_candidates(spec: Spec) -> None:
    large = spec.model_copy(update={"model": "falcon-180b"})
    assert candidates(large, demand_of(large, 1.0, LIMITS)) == []
    with pytest.raises(ConfigError, match="no instance"):
        search(large, demand_of(large, 1.0, LIMITS), seed=0)


def test_more_load_takes_more_replicas(spec: Spec) -> None:
    costs = [candidates(spec, demand_of(spec, rate, LIMITS))[0].usd for rate in (1.0, 10.0, 100.0)]
    assert costs == sorted(costs)
    assert costs[0] < costs[2]


def test_a_batch_keeps_the_limit_and_fits(spec: Spec) -> None:
    demand = demand_of(spec, 1.0, LIMITS)
    for rig in rigs(spec, spec.decode[0], (), Codec(name="fp16")):
        batch, step_s, _ = best_batch(rig, demand)
        assert 0 < step_s <= 0.06
        assert batch * rig.sizes.footprint.sealed(4100) <= rig.pages


def test_prompts_that_take_too_long_have_no_replicas(spec: Spec) -> None:
    rig = next(rigs(spec, spec.decode[0], (), Codec(name="fp16")))
    assert prefill_part(rig, demand_of(spec, 1.0, LIMITS)) is not None
    assert prefill_part(rig, demand_of(spec, 1.0, parse("ttft_p90=1ms"))) is None


def test_what_can_be_had_limits_what_is_bought(spec: Spec) -> None:
    few = spec.model_copy(update={"plan": spec.plan.model_copy(update={"available": {"p4de.24xlarge": 1}})})
    for one in candidates(few, demand_of(few, 5.0, LIMITS)):
        used = sum(part.count * part.rig.pool.gpus for part in one.parts if part.rig.pool.instance == "p4de.24xlarge")
        assert used <= 8


def test_no_cluster_with_fewer_replicas_keeps_the_objective(spec: Spec) -> None:
    demand = demand_of(spec, 8.0, LIMITS)
    split = next(one for one in candidates(spec, demand) if one.prefill)
    trial = settle(spec, split, demand, 300, 0)
    assert trial is not None
    assert trial.keeps
    assert all(trial.found[str(limit)] <= limit.seconds for limit in LIMITS)
    less = trial.candidate.changed(0, -1)
    if less is not None:
        assert not try_out(spec, less, demand, 300, 0).keeps


@pytest.mark.slow
def test_a_budget_is_kept(spec: Spec) -> None:
    only = spec.plan.model_copy(update={"aggregated": False, "codecs": (Codec(name="fp16"),)})
    spec = spec.model_copy(update={"plan": only})
    trials = most(spec, demand_of(spec, 1.0, LIMITS), 20.0, 0)
    assert trials[0].usd <= 20.0
    assert all(trial.keeps for trial in trials)
    with pytest.raises(ConfigError, match="buys nothing"):
        most(spec, demand_of(spec, 1.0, LIMITS), 0.5, 0)


def test_the_most_exact_of_equals_wins() -> None:
    assert winner({"fp16": 1.01, "fp8": 1.0, "rot-k4v4": 0.995}) == "fp16"
    assert winner({"fp16": 1.2, "fp8": 1.0, "rot-k4v4": 0.99}) == "fp8"
    assert winner({}) == ""


def test_long_prompts_on_thin_lines_want_few_bits() -> None:
    pool = ReplicaPool(instance="p4de.24xlarge", replicas=1, chunk_tokens=4096)
    spec = Spec(
        model="mistral-7b",
        prefill=(pool,),
        decode=(pool,),
        load=Load(input_len=16_000, output_len=200),
        plan=Choices(tp=(1,), pp=(1,), aggregated=False, codecs=(Codec(name="fp16"), Codec(name="rot-k4v4"))),
        network={"link_gbit_s": 2},  # type: ignore[arg-type]
    )
    costs = share_costs(spec, demand_of(spec, 20.0, parse("ttft_p90=20s,tpot_p90=50ms")))
    assert winner(costs) == "rot-k4v4"
    assert costs["rot-k4v4"] < 0.5 * costs["fp16"]


def test_a_sample_of_a_load(spec: Spec) -> None:
    demand: ServiceTarget = demand_of(spec, 3.0, LIMITS)
    assert (demand.prompt, demand.output, demand.longest) == (4000, 100, 4100)
    assert demand.at(5.0).rate == 5.0


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("tp: [1, 4]", "tp: [4]"))
    out = tmp_path / "out"
    arguments = [str(path), "--slo", "ttft_p90=2s,tpot_p90=60ms", "--rate", "3", "--out", str(out)]
    assert main(arguments) == 0
    page, data = (out / "plan.md").read_text(), json.loads((out / "plan.json").read_text())
    for words in ("cheapest of every kind", "What to upgrade next", "Where which codec wins", "hackkv plan"):
        assert words in page
    assert {plan["kind"] for plan in data["plans"]} >= {"fp16", "rot-k4v4", "fp16, aggregated"}
    assert all(plan["found_s"]["tpot_p90 <= 0.06 s"] <= 0.06 for plan in data["plans"])


def test_errors(tmp_path: Path, spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "spec.yaml")
    assert main([path, "--slo", "ttft_p90=1ms", "--rate", "1"]) == 2
    assert "hackkv plan: --slo: no instance" in capsys.readouterr().err


def test_one_machine_is_not_planned(tmp_path: Path, spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec.model_copy(update={"host": Host(cores=2)}).model_dump_json())
    assert main([str(path), "--slo", "ttft_p90=1s", "--rate", "1"]) == 2
    assert "host: formulas know machines of their own only" in capsys.readouterr().err
