"""A request as a trace: spans of the router, the trace in headers, in jobs, on the page and in logs."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx
import pytest

from hackkv.config import TracesConfig
from hackkv.errors import NodeLost
from hackkv.timing import Stage
from hackkv.tokenizer import Tokenizer
from node.logs import ACCESS, JsonLines
from node.spans import ProcessTracer, open_spans
from router.api.app import build_app
from router.api.served import ServedModel
from router.config import RouterConfig
from tests.collector import Collector
from tests.router.conftest import make_served
from tests.router.scripted import Cluster, Point
from transport.trail import TraceContext, read_traceparent

COMPLETIONS = "/v1/completions"
PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
BODY = {"prompt": "x", "max_tokens": 3}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that receives spans."""
    with Collector() as collector:
        yield collector


@dataclass(frozen=True, slots=True)
class Traced:
    """An application whose spans go to a collector, and its client."""

    http: httpx.AsyncClient
    spans: ProcessTracer
    served: ServedModel


@pytest.fixture
async def traced(collector: Collector, cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[Traced]:
    """A `Traced` over a scripted cluster."""
    spans = open_spans(TracesConfig(endpoint=collector.endpoint), "router", "r")
    served = make_served(cluster, tokenizer)
    transport = httpx.ASGITransport(build_app(served, spans=spans))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield Traced(http, spans, served)
    await spans.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, {"traceparent": PARENT.traceparent, "tracestate": "a=1"}])
async def test_a_request_is_a_tree_of_spans(
    collector: Collector, traced: Traced, stream: bool, headers: dict[str, str]
) -> None:
    response = await traced.http.post(COMPLETIONS, json={**BODY, "n": 2, "stream": stream}, headers=headers)
    await traced.spans.close()
    told = read_traceparent(response.headers["traceparent"])
    root = collector.span(f"POST {COMPLETIONS}")
    assert told == TraceContext(root.trace_id, root.span_id, True)
    assert (root.trace_id == PARENT.trace_id, root.parent_id) == (bool(headers), PARENT.span_id if headers else "")
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["hackkv.request_id"] == response.headers["x-request-id"]
    sequences = collector.spans("sequence")
    assert [span.parent_id for span in sequences] == [root.span_id] * 2
    for sequence in sequences:
        states = [span for span in collector.spans() if span.parent_id == sequence.span_id]
        assert [span.name for span in states][:2] == ["queued", "prefilling"]
        assert states[-1].name == "streaming"
        for before, after in itertools.pairwise(states):
            assert before.end_ns == after.start_ns
        assert {f"hackkv.stage.{stage}_s" for stage in Stage} <= sequence.attributes.keys()
        assert sequence.attributes["gen_ai.usage.output_tokens"] == 3
        assert sequence.attributes["hackkv.outcome"] == "length"
    for span in collector.spans():
        assert span.trace_id == root.trace_id
        assert span.start_ns <= span.end_ns
    assert collector.span("intake").parent_id == root.span_id


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models/whatever/it/is", "POST /v1/models/{model:path}"),
        ("/v1/whatever", "POST"),
        (COMPLETIONS, f"POST {COMPLETIONS}"),
    ],
)
async def test_a_span_has_the_name_of_its_route_whatever_clients_write(
    collector: Collector, traced: Traced, path: str, name: str
) -> None:
    await traced.http.post(path, json={})
    await traced.spans.close()
    span = collector.span(name)
    assert span.attributes["url.path"] == path
    assert span.attributes.get("http.route", "") == name.removeprefix("POST").lstrip()


async def test_what_goes_wrong_is_seen(collector: Collector, traced: Traced, cluster: Cluster) -> None:
    assert (await traced.http.post(COMPLETIONS, json={**BODY, "max_tokens": -1})).status_code == 400
    for node in ("d0", "d1"):
        cluster.script.faults[node, Point.TOKEN] = [NodeLost("gone")] * 4
    assert (await traced.http.post(COMPLETIONS, json=BODY)).status_code == 502
    await traced.spans.close()
    roots = {
        span.attributes["http.response.status_code"]: span.failed for span in collector.spans(f"POST {COMPLETIONS}")
    }
    assert roots == {400: "", 502: "502"}
    assert collector.span("sequence").failed == "failed"
    assert "waiting for room" in {span.name for span in collector.spans()}


async def test_questions_about_the_server_are_no_traces(collector: Collector, traced: Traced) -> None:
    for path in ("/live", "/metrics", "/v1/models"):
        response = await traced.http.get(path, headers={"traceparent": PARENT.traceparent})
        assert "traceparent" not in response.headers
    await traced.spans.close()
    assert collector.spans() == []


@pytest.mark.parametrize("sampled", [True, False])
async def test_the_page_links_to_what_can_be_seen(cluster: Cluster, tokenizer: Tokenizer, sampled: bool) -> None:
    """The router has no spans of its own here. It still knows the client's trace and passes it on."""
    served = make_served(cluster, tokenizer, trace_link="https://traces.example/{trace_id}?x")
    parent = TraceContext(PARENT.trace_id, PARENT.span_id, sampled)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(served)), base_url="http://router") as http:
        for headers in ({"traceparent": parent.traceparent}, {}):
            response = await http.post(COMPLETIONS, json=BODY, headers=headers)
            assert response.headers.get("traceparent") == headers.get("traceparent")
        one, other = (await http.get("/api/requests")).json()["ended"]
    assert one["trace_id"] == (PARENT.trace_id if sampled else None)
    assert one.get("trace_link") == (f"https://traces.example/{PARENT.trace_id}?x" if sampled else None)
    assert (other["trace_id"], "trace_link" in other) == (None, False)


async def test_lines_of_the_log_name_the_request_and_its_trace(
    cluster: Cluster, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[dict[str, object]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines("router").format(record)))

    handler = Keep()
    caplog.set_level(logging.INFO, ACCESS)
    logging.getLogger(ACCESS).addHandler(handler)
    try:
        app = build_app(make_served(cluster, tokenizer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            asked = [{"x-request-id": f"r{index}", "traceparent": PARENT.traceparent} for index in range(3)]
            await asyncio.gather(*(http.post(COMPLETIONS, json=BODY, headers=headers) for headers in asked))
            await http.get("/v1/models")
    finally:
        logging.getLogger(ACCESS).removeHandler(handler)
    assert {line["request_id"] for line in lines} == {"r0", "r1", "r2"}
    for line in lines:
        assert (line["trace_id"], line["status"], line["path"]) == (PARENT.trace_id, 200, COMPLETIONS)


@pytest.mark.parametrize("link", ["javascript:alert(1)//{trace_id}", "https://traces.example/", "/{trace_id}"])
def test_a_link_leads_to_a_trace_somewhere(link: str) -> None:
    with pytest.raises(ValueError, match="trace_link"):
        RouterConfig.model_validate({"model": "x", "trace_link": link})
