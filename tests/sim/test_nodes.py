"""Nodes without weights: the live services over naps, behind the real router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

from hackkv.errors import ConfigError
from hackkv.model.tiny import Tiny, write_tiny
from node.process import Shutdown
from sim.nodes import FleetConfig, serve
from sim.weightless import Weightless
from tests.e2e.in_process import in_process_router
from tests.pair import PI, TIMEOUT_S, greedy, paired, prompt
from tests.sim.clusters import weightless

NODES = 6


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k4v4", "kivi-2"])
async def test_tokens_replays_and_times(codec: str, tmp_path: Path) -> None:
    worker = weightless(tmp_path, codec)
    model, ids = worker.model, prompt(1, 2 * PI + 5)
    assert isinstance(model, Weightless)
    async with paired(worker) as nodes:
        served = await nodes.serve(greedy("a", ids, 6))
        wanted = [ids[-1]]
        for position in range(len(ids) - 1, len(ids) + 5):
            wanted.append(model.following(wanted[-1], position))
        assert [token.token_id for token in served.tokens] == wanted[1:]
        again = await nodes.serve(greedy("a", ids, 6), epoch=1, emitted=tuple(wanted[1:4]))
        assert [token.token_id for token in again.tokens] == wanted[4:]
        await nodes.assert_idle()
    # A nap is never too short, however busy the machine is.
    assert served.prefilled.prefill_s >= model.cost.prefill([(0, len(ids))]).seconds
    assert served.decoded is not None
    assert served.decoded.decode_s >= model.cost.decode(1).seconds(len(ids), 5)


async def test_requests_of_a_batch_go_through_real_frames(tmp_path: Path) -> None:
    async with paired(weightless(tmp_path, "rot-k4v4"), num_pages=40) as nodes:
        all_served = await asyncio.gather(*(nodes.serve(greedy(f"r{i}", prompt(i, 20 + 9 * i), 4)) for i in range(6)))
        await nodes.assert_idle()
    for number, served in enumerate(all_served):
        assert served.handed_off is not None
        assert served.handed_off.receipt.tokens == 20 + 9 * number
        assert sum(dict(served.handed_off.receipt.bytes_by_plane).values()) > 0


async def test_a_fleet_of_one_process_behind_a_real_router(tmp_path: Path) -> None:
    """The first requests find idle nodes only, so every node gets one."""
    folder = write_tiny(tmp_path / "model", Tiny(max_context=1024))
    pool = {"instance": "p4de.24xlarge", "replicas": NODES, "pages": 200}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"model": "mistral-7b", "prefill": pool, "decode": pool}))
    async with (
        in_process_router(folder) as router,
        httpx.AsyncClient(base_url=router["http"], timeout=TIMEOUT_S) as client,
        asyncio.timeout(TIMEOUT_S),
    ):
        shutdown = Shutdown()
        config = FleetConfig(spec=tmp_path / "spec.yaml", router=router["control"], model=str(folder))
        fleet = asyncio.create_task(serve(config, shutdown))
        while (await client.get("/health")).json()["nodes"] != {"prefill": NODES, "decode": NODES}:
            assert not fleet.done()
        body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_stages": True}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={**body, "prompt": list(prompt(i, 50))}) for i in range(2 * NODES))
        )
        shutdown.order()
        await fleet
    reports = [answer.raise_for_status().json()["hackkv"] for answer in answers]
    for role in ("prefill", "decode"):
        assert {report[f"{role}_node"] for report in reports} == {f"{role}-{number}" for number in range(NODES)}


async def test_replicas_that_do_both_are_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("model: mistral-7b\ndecode: {instance: p4de.24xlarge, replicas: 1}\n")
    with pytest.raises(ConfigError, match=r"spec\.yaml: prefill: replicas that do both"):
        await serve(FleetConfig(spec=tmp_path / "spec.yaml"), Shutdown())
