"""The page's files and the JSON behind it, over a scripted cluster."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import router
from hackkv.errors import NodeLost
from hackkv.timing import Stage
from hackkv.tokenizer import Tokenizer
from hackkv.types import Role
from router.app import build_app
from router.journal import ENDED, GONE_S, SAMPLES, TOTALS, Journal
from tests.router.conftest import Api, check_error, make_backend
from tests.router.scripted import Cluster, Point, info

FILES = {path.name: path.read_bytes() for path in Path(router.__file__).with_name("web").iterdir()}
COMPLETIONS = "/v1/completions"
VENDORED = {
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Of the npm package uplot 1.6.32: dist/uPlot.iife.min.js and dist/uPlot.min.css."""


async def samples(api: Api, after: int = 0) -> list[dict[str, float]]:
    """What `/api/cluster` says of the last minutes, as objects."""
    told = (await api.http.get("/api/cluster", params={"after": after})).json()["samples"]
    return [dict(zip(told["fields"], row, strict=True)) for row in told["rows"]]


async def requests(api: Api, after: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = (await api.http.get("/api/requests", params={"after": after})).json()
    return told


async def test_every_file_of_the_page_is_served_and_names_no_other_origin(api: Api) -> None:
    page = await api.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="/page/([^"]+)"', page.text)
    for name, content in FILES.items():
        answer = await api.http.get(f"/page/{name}")
        assert answer.content == content
        assert answer.headers["x-content-type-options"] == "nosniff"
        if name not in VENDORED:
            named += re.findall(r'from "\./([^"]+)"', answer.text)
            assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w+\.", answer.text), name
    assert FILES.keys() == {*named, "index.html"}


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_files_are_what_was_published(name: str) -> None:
    assert hashlib.sha256(FILES[name]).hexdigest() == VENDORED[name]


@pytest.mark.parametrize("name", ["..%2fapp.py", "nothing.js", "%2e%2e/app.py", "index.html/x"])
async def test_nothing_else_is_served(api: Api, name: str) -> None:
    check_error(await api.http.get(f"/page/{name}"), 404)


async def test_the_page_is_open_and_what_it_shows_is_not(cluster: Cluster, tokenizer: Tokenizer) -> None:
    app = build_app(make_backend(cluster, tokenizer), ("sesame",))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        assert (await client.get("/")).status_code == (await client.get("/page/app.js")).status_code == 200
        for path in ("/api/cluster", "/api/requests"):
            check_error(await client.get(path), 401)
            assert (await client.get(path, headers={"Authorization": "Bearer sesame"})).status_code == 200


@pytest.mark.parametrize("path", ["/api/cluster", "/api/requests"])
@pytest.mark.parametrize("after", ["-1", "x", "", "1.5", "٣", "9" * 99])
async def test_a_bad_number_is_refused_by_name(api: Api, path: str, after: str) -> None:
    assert check_error(await api.http.get(path, params={"after": after}), 400)["param"] == "after"


async def test_a_finished_request_is_told_without_its_text(api: Api) -> None:
    body = {"prompt": "the secret fox", "max_tokens": 5}
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    told = await requests(api)
    [one] = told["ended"]
    assert told["live"] == []
    assert one["id"].startswith(answer["id"])
    assert (one["outcome"], one["output_tokens"], one["max_tokens"]) == ("length", 5, 5)
    assert one["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert sum(one["stages"].values()) == pytest.approx(one["total_s"])
    assert one["ttft_s"] + 4 * one["tpot_s"] <= one["total_s"]
    assert (one["prefill_node"], one["decode_node"], one["attempts"]) == ("p0", "d0", 1)
    assert one["kv"]["ratio"] == pytest.approx((5 * one["prompt_tokens"] + 7) / (32 * one["prompt_tokens"]))
    assert "secret" not in str(told)
    assert "choices" not in str(told)
    assert (await requests(api, after=one["seq"]))["ended"] == []


async def test_a_request_on_its_way_is_told_with_its_tokens_so_far(api: Api) -> None:
    gate = api.cluster.gate(Point.TOKEN)
    body = {"prompt": "x", "max_tokens": 5}
    task = asyncio.create_task(api.http.post(COMPLETIONS, json=body))
    await api.cluster.script.reached[Point.TOKEN].wait()
    [one] = (await requests(api))["live"]
    assert (one["output_tokens"], one["max_tokens"]) == (2, 5)
    api.backend.journal.sample()
    assert (await samples(api))[-1]["output_tokens"] == 2
    assert (await samples(api))[-1]["live"] == 1
    gate.set()
    await task
    assert (await requests(api))["live"] == []
    api.backend.journal.sample()
    assert (await samples(api))[-1]["output_tokens"] == 5


async def test_samples_count_up_and_stages_are_those_of_finished_requests(api: Api) -> None:
    api.backend.journal.sample()
    for node_id in ("d0", "d1"):
        api.cluster.fail(node_id, Point.LANDED, *(NodeLost("gone") for _ in range(2)))
    assert (await api.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})).status_code == 502
    api.cluster.script.faults.clear()
    api.cluster.now += 60
    for member in api.cluster.fleet.members():
        await api.cluster.fleet.register(member.info)
    assert (await api.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "n": 2})).status_code == 200
    api.backend.journal.sample()
    first, last = await samples(api)
    assert {name: first[name] for name in TOTALS} == dict.fromkeys(TOTALS, 0)
    assert (last["finished"], last["failed"]) == (2, 1)
    assert last["kv_bytes"] > last["fp16_bytes"] * 5 / 32 > 0
    ended = [one for one in (await requests(api))["ended"] if one["outcome"] == "length"]
    for stage in Stage:
        assert last[f"{stage}_s"] == pytest.approx(sum(one["stages"][stage] for one in ended))
    assert await samples(api, after=int(first["seq"])) == [last]


async def test_a_node_that_is_gone_is_remembered_for_a_while(api: Api) -> None:
    cluster, now = api.cluster, 0.0
    journal = Journal(cluster.fleet, lambda: now)
    journal.sample()
    cluster.now += 2
    for node_id in ("p0", "p1", "d0"):
        await cluster.fleet.register(info(Role.PREFILL if node_id[0] == "p" else Role.DECODE, node_id))
    cluster.now += 2
    cluster.fleet.expire()
    now += 5
    assert journal.gone() == [{"id": "d1", "role": "decode", "drained": False, "gone_s": 5}]
    now += GONE_S
    journal.sample()
    assert journal.gone() == []
    assert {node["id"] for node in (await api.http.get("/api/cluster")).json()["nodes"]} == {"p0", "p1", "d0"}


async def test_memory_is_bounded(api: Api) -> None:
    journal = api.backend.journal
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
