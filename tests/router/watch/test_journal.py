"""The journal of the page: requests on their way and ended, samples, and nodes that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hackkv.errors import NodeLost
from hackkv.held import HeldKv
from hackkv.timing import Stage
from hackkv.types import Role
from router.watch.journal import ENDED, GONE_S, SAMPLES, TOTALS, Journal
from tests.router.conftest import INSIDE, Inside
from tests.router.scripted import PAGE_TOKENS, Point, info

pytestmark = INSIDE
COMPLETIONS = "/v1/completions"


async def samples(api: Inside, after: int = 0) -> list[dict[str, float]]:
    """The samples of the last minutes from `/api/cluster`, as objects."""
    told = (await api.http.get("/api/cluster", params={"after": after})).json()["samples"]
    return [dict(zip(told["fields"], row, strict=True)) for row in told["rows"]]


async def requests(api: Inside, after: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = (await api.http.get("/api/requests", params={"after": after})).json()
    return told


async def test_tokens_that_were_there_already_are_summed(api: Inside) -> None:
    api.cluster.script.cached_tokens, api.cluster.script.held = 1, HeldKv(1)
    told = []
    for _ in range(2):
        await api.http.post(COMPLETIONS, json={"prompt": [5] * 20, "max_tokens": 5})
        api.served.journal.sample()
        told.append((await samples(api))[-1])
    assert [(one["cached_tokens"], one["held_tokens"]) for one in told] == [(1, PAGE_TOKENS), (2, 2 * PAGE_TOKENS)]
    assert [one["held_tokens"] for one in (await requests(api))["ended"]] == [PAGE_TOKENS] * 2


async def test_a_request_on_its_way_is_told_with_its_tokens_so_far(api: Inside) -> None:
    gate = api.cluster.gate(Point.TOKEN)
    body = {"prompt": "x", "max_tokens": 5}
    task = asyncio.create_task(api.http.post(COMPLETIONS, json=body))
    await api.cluster.script.reached[Point.TOKEN].wait()
    [one] = (await requests(api))["live"]
    assert (one["output_tokens"], one["max_tokens"]) == (2, 5)
    api.served.journal.sample()
    assert (await samples(api))[-1]["output_tokens"] == 2
    assert (await samples(api))[-1]["live"] == 1
    gate.set()
    await task
    assert (await requests(api))["live"] == []
    api.served.journal.sample()
    assert (await samples(api))[-1]["output_tokens"] == 5


async def test_samples_count_up_and_stages_are_those_of_finished_requests(api: Inside) -> None:
    api.served.journal.sample()
    for node_id in ("d0", "d1"):
        api.cluster.fail(node_id, Point.LANDED, *(NodeLost("gone") for _ in range(2)))
    assert (await api.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})).status_code == 502
    api.cluster.script.faults.clear()
    api.cluster.now += 60
    for member in api.cluster.fleet.nodes.members():
        await api.cluster.fleet.nodes.register(member.info)
    assert (await api.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "n": 2})).status_code == 200
    api.served.journal.sample()
    first, last = await samples(api)
    assert {name: first[name] for name in TOTALS} == dict.fromkeys(TOTALS, 0)
    assert (last["finished"], last["failed"]) == (2, 1)
    assert last["kv_bytes"] > last["fp16_bytes"] * 5 / 32 > 0
    ended = [one for one in (await requests(api))["ended"] if one["outcome"] == "length"]
    for stage in Stage:
        assert last[f"{stage}_s"] == pytest.approx(sum(one["stages"][stage] for one in ended))
    assert await samples(api, after=int(first["seq"])) == [last]


async def test_a_node_that_is_gone_is_remembered_for_a_while(api: Inside) -> None:
    cluster, now = api.cluster, 0.0
    journal = Journal(cluster.fleet, lambda: now)
    journal.sample()
    cluster.now += 2
    for node_id in ("p0", "p1", "d0"):
        await cluster.fleet.nodes.register(info(Role.PREFILL if node_id[0] == "p" else Role.DECODE, node_id))
    cluster.now += 2
    cluster.fleet.nodes.expire()
    now += 5
    assert journal.gone() == [{"id": "d1", "role": "decode", "drained": False, "gone_s": 5}]
    now += GONE_S
    journal.sample()
    assert journal.gone() == []
    assert {node["id"] for node in (await api.http.get("/api/cluster")).json()["nodes"]} == {"p0", "p1", "d0"}


async def test_memory_is_bounded(api: Inside) -> None:
    journal = api.served.journal
    for _ in range(SAMPLES + 5):
        journal.sample()
    rows = await samples(api)
    assert len(rows) == SAMPLES
    assert rows[-1]["seq"] == SAMPLES + 5
    body = {"prompt": ["x"] * 30, "max_tokens": 1}
    for _ in range(8):
        assert (await api.http.post(COMPLETIONS, json=body)).status_code == 200
    ended = (await requests(api))["ended"]
    assert len(ended) == ENDED
    assert ended[-1]["seq"] == 240
