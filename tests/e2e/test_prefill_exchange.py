"""A conversation whose prefill node is exchanged between two turns, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.worker import load_worker
from hackkv.types import Request, Sampling
from tests.e2e.processes import START_S, Fleet, until

CODEC = "rot-k3v2"
TOKENS, PAGE = 100, 64


def stat(fleet: Fleet, name: str) -> float:
    """The sum of a series over all nodes, by their last reports."""
    return sum(value for key, value in fleet.api.metrics().items() if key.partition("{")[0] == name)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["lends", "dies"])
def test_the_next_turn_is_what_a_cold_run_says(checkpoint: Path, tmp_path: Path, dies: bool) -> None:
    """The decode node lends its pages to a prefill node that has just started, or dies at their second frame."""
    worker = load_worker(ModelConfig(path=str(checkpoint), dtype="float32", threads=1), CodecConfig(name=CODEC))
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"rules": [{"at": "decode.lent", "do": "kill", "nth": 2}]}), encoding="utf-8")
    suffers = {"faults": str(plan)} if dies else {}
    fleet = Fleet(tmp_path, checkpoint, {"name": CODEC}, {"lease_ttl_s": 3.0}, num_decode=0)
    try:
        decode = [fleet.node("decode", f"decode-{number}", **suffers) for number in range(2)]
        until(lambda: fleet.api.nodes["decode"] == 2, START_S, "two decode nodes are there")
        ids = list(range(3, 303))
        ids += [*fleet.api.complete(ids, TOKENS)["choices"][0]["token_ids"], 7, 8, 9]
        until(lambda: stat(fleet, "hackkv_held_exact_rows") == 1, START_S, "exact rows are kept")
        fleet.prefill.kill()
        until(lambda: fleet.api.nodes["prefill"] == 0, START_S, "the prefill node is gone")
        fleet.node("prefill", "prefill-1", prefix_fetch="always", fetch_s=START_S)
        until(lambda: fleet.api.nodes["prefill"] == 1, START_S, "another prefill node is there")
        told = fleet.api.complete(ids, TOKENS)
        request = Request("cold", tuple(ids), Sampling(0, TOKENS, temperature=0.0, ignore_eos=True))
        assert told["choices"][0]["token_ids"] == [token.token_id for token in generate(worker, request)]
        assert [node.process.poll() is None for node in decode].count(False) == dies
        if dies:
            until(lambda: stat(fleet, "hackkv_fetch_failed_total") == 1, START_S, "the node has reported")
        else:
            assert stat(fleet, "hackkv_kv_fetched_tokens_total") == (300 + TOKENS - 1) // PAGE * PAGE
            assert 0 < told["hackkv"]["sub_stages"]["fetch"] <= told["hackkv"]["stages"]["prefill_queue"]
    finally:
        fleet.stop()
