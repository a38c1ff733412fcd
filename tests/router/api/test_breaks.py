"""Requests that do not end as they should: too late, by a bug, or because the client left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hackkv.tokenizer import Tokenizer
from hackkv.types import Request
from router.api.app import build_app
from tests.router.conftest import INSIDE, Api, Inside, check_error, make_served
from tests.router.scripted import Cluster, Point

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("settings", [{"deadlines": {"prefill_s": 0.01}}])
async def test_a_deadline_is_a_504(api: Api) -> None:
    api.cluster.gate(Point.PREFILL)
    check_error(await api.http.post(COMPLETIONS, json={"prompt": "x"}), 504)
    await api.assert_idle()


async def test_a_bug_is_a_500_that_gives_nothing_away(cluster: Cluster, tokenizer: Tokenizer) -> None:
    def bug(request: Request) -> list[int]:
        raise ZeroDivisionError("secret")

    cluster.script.answer = bug
    transport = httpx.ASGITransport(build_app(make_served(cluster, tokenizer)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        assert "secret" not in check_error(await client.post(COMPLETIONS, json={"prompt": "x"}), 500)["message"]
    cluster.assert_idle()


@INSIDE
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [Point.PREFILL, Point.RESERVE, Point.HANDOFF, Point.TOKEN])
async def test_a_client_that_leaves_stops_both_legs(api: Inside, point: Point, stream: bool) -> None:
    api.cluster.gate(point)
    gone, sent = asyncio.Event(), []
    body = json.dumps({"prompt": "x", "max_tokens": 9, "stream": stream}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "client": ("c", 1), "server": ("s", 1),
    }  # fmt: skip
    serving = asyncio.ensure_future(api.app(scope, receive, send))
    await api.cluster.script.reached[point].wait()
    gone.set()
    await serving
    api.cluster.assert_idle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    page = api.served.metrics.render().decode()
    assert 'hackkv_requests_total{outcome="cancelled"} 1.0' in page
    assert "hackkv_router_inflight 0.0" in page
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert statuses == ([200] if stream and point in (Point.HANDOFF, Point.TOKEN) else [499])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_node_that_scores_too_few_tokens_of_a_prompt_is_not_believed(api: Api, stream: bool) -> None:
    api.cluster.script.unscored = 1
    body = {"prompt": "xyz", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
    response = await api.http.post("/v1/completions", json=body)
    assert "scored 1 tokens of a prompt where 2 were due" in response.json()["error"]["message"]
    assert response.status_code == 502
