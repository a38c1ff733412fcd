"""Real processes suffer a plan over real sockets, and the client does not notice."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import yaml

from app.cluster import ClusterPlan, running
from hackkv.model.tiny import Tiny, write_tiny

PLAN = {
    "rules": [
        {"at": "wire.frame", "nth": 2, "do": "corrupt"},
        {"at": "decode.token", "node": "decode-1", "nth": 3, "do": "cut"},
        {"at": "decode.token", "node": "decode-0", "nth": 3, "do": "cut"},
    ]
}


@pytest.mark.slow
async def test_a_flipped_bit_and_cut_streams_are_survived(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", Tiny())
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    ports = {"listen": {"port": 0}, "control": {"port": 0}}
    router = {**ports, "model": str(model), "lease_ttl_s": 15.0}  # long enough that a slow node is not lost
    worker = {"model": {"path": str(model), "dtype": "float32", "threads": 1}, "faults": str(plan)}
    body = {"prompt": "a flipped bit " * 20, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    cluster_plan = ClusterPlan(router, worker, num_prefill=1, num_decode=2)
    async with running(cluster_plan, lambda _: None) as cluster, httpx.AsyncClient(timeout=240) as client:
        struck, spared = [
            (await client.post(f"{cluster.url}/v1/completions", json=body | {"return_stages": True})).json()
            for _ in range(2)
        ]
    assert (struck["hackkv"]["attempts"], spared["hackkv"]["attempts"]) == (4, 1)
    assert struck["choices"][0]["text"] == spared["choices"][0]["text"]
