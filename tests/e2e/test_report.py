"""The opt-in report of a request: each node reports the stages and sub-stages that it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker
from hackkv.timing import Stage
from tests.e2e.in_process import in_process_cluster
from tests.router.processes import ROUTERS


@ROUTERS
@pytest.mark.parametrize("stream", [False, True])
async def test_workers_account_for_their_stages(tmp_path: Path, stream: bool, workers: int) -> None:
    # The reference can tell the correction terms of Eq. (4) apart; fused kernels need not.
    worker = load_worker(
        ModelConfig(path=str(write_tiny(tmp_path, Tiny())), dtype="float32", backend="reference"),
        CodecConfig(name="hack", settings={"page_tokens": 32}),
    )
    body = {"prompt": list(range(3, 103)), "max_tokens": 5, "ignore_eos": True, "return_stages": True, "stream": stream}
    async with in_process_cluster(tmp_path, worker, "grpc", 1, workers=workers) as client:
        response = await client.post("/v1/completions", json=body)
        metrics = (await client.get("/metrics")).text
        nodes = (await client.get("/version")).json()["nodes"]
    report = response.json()["hackkv"] if not stream else _last_event(response.text)["hackkv"]
    assert nodes["decode-0"] == {"role": "decode", "kernels": "reference (torch), batch invariant", "codec_loss": None}
    stages, sub_stages = report["stages"], report["sub_stages"]
    assert set(stages) == set(Stage)
    assert sum(stages.values()) == pytest.approx(report["total_s"])
    assert 0 < sub_stages["quantize"] < stages["prefill"]
    assert 0 < sub_stages["wire_encode"] < stages["prefill"]
    assert 0 < sub_stages["wire_decode"] < report["total_s"]
    assert 0 < sub_stages["approximation"] < sub_stages["attend"] < stages["decode"]
    assert stages["decode_queue"] > 0
    kv = report["kv"]
    assert kv["tokens"] == 100
    assert kv["header_bytes"] > 0
    # Three sealed pages and four open rows, of 2 layers x 2 KV heads x head_dim 64.
    assert kv["bytes_by_plane"]["k_codes"] == 3 * 2 * 2 * 32 * 64 // 4
    assert kv["bytes_by_plane"]["open_v"] == 4 * 2 * 2 * 64 * 2
    assert 'hackkv_request_substage_seconds_count{stage="attend"} 1.0' in metrics


def _last_event(text: str) -> dict[str, Any]:
    events = [line for line in text.splitlines() if line.startswith("data: {")]
    parsed: dict[str, Any] = json.loads(events[-1].removeprefix("data: "))
    return parsed
