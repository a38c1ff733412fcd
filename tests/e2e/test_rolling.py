"""Every node of a cluster is restarted under load; clients notice nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.cluster import metrics, tiny_cluster
from bench.reliability.load import bodies, steady
from bench.reliability.scenarios import SCENARIOS

RATE = 4.0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rolling_restart_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    requests = bodies(8, seed=1)
    async with tiny_cluster(tmp_path / "tiny") as cluster:
        calm = await steady(cluster.url, requests, RATE, lambda: None)
        rolling = asyncio.ensure_future(SCENARIOS["rolling"].disturb(cluster))
        while not rolling.done():
            shaken = await steady(cluster.url, requests, RATE, lambda: None)
            assert [outcome.error for outcome in shaken] == [""] * len(requests)
            assert [outcome.token_ids for outcome in shaken] == [outcome.token_ids for outcome in calm]
        await rolling
        page = await metrics(cluster.url)
    assert not page.get('hackkv_requests_total{outcome="failed"}')
