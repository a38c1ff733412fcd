"""Spans of nodes, as a collector gets them for a router's calls over the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from hackkv.config import TracesConfig
from hackkv.errors import TransferError
from hackkv.held import HeldKv
from node.spans import NoSpans, ProcessTracer, open_spans
from node.traced import TracedDecode, TracedPrefill, traced_decode, traced_prefill
from tests.collector import Collector
from tests.transport import nouns
from tests.transport.fakes import DECODE_EVENTS, PREFILL_EVENTS, FakeDecode, FakePrefill
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient
from transport.rpc_server import RpcServer
from transport.trail import TRAIL, NoSpan, TraceContext, Trail

CONTEXT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "vendor=1")


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector of spans."""
    with Collector() as collector:
        yield collector


@pytest.fixture
async def spans(collector: Collector) -> AsyncIterator[ProcessTracer]:
    """A tracer that sends to the collector."""
    spans = open_spans(TracesConfig(endpoint=collector.endpoint, headers={"x-key": "k"}), "prefill", "p-1")
    yield spans
    await spans.close()


class Nodes:
    """Two traced nodes behind a real server."""

    def __init__(self, spans: ProcessTracer, channels: ChannelPool) -> None:
        self.fake, self.server, self._channels = FakePrefill(), RpcServer("127.0.0.1", 0), channels
        self.server.add_prefill(traced_prefill(self.fake, spans))
        self.server.add_decode(traced_decode(FakeDecode(), spans))

    async def start(self) -> tuple[PrefillClient, DecodeClient]:
        """Start the server; return clients of both nodes."""
        address = await self.server.start()
        return PrefillClient(address, self._channels), DecodeClient(address, self._channels)


@pytest.fixture
async def nodes(spans: ProcessTracer) -> AsyncIterator[Nodes]:
    """See `Nodes`."""
    channels = ChannelPool()
    nodes = Nodes(spans, channels)
    yield nodes
    await channels.close()
    await nodes.server.close()


@pytest.fixture
def _asked() -> Iterator[None]:
    """Make calls of the test part of a trace."""
    token = TRAIL.set(Trail("cmpl-1-0", NoSpan(CONTEXT)))
    yield
    TRAIL.reset(token)


@pytest.mark.usefixtures("_asked")
async def test_stages_of_both_nodes_lie_within_their_calls(
    collector: Collector, nodes: Nodes, spans: ProcessTracer
) -> None:
    prefill, decode = await nodes.start()
    assert [event async for event in prefill.prefill(nouns.prefill_job())] == PREFILL_EVENTS
    assert [event async for event in decode.decode(nouns.decode_job())] == DECODE_EVENTS
    await spans.close()
    for call, names in (
        ("Prefill", ["prefill_queue", "prefill", "transfer", "transfer"]),
        ("Decode", ["reserve", "receive", "swapped", "decode_queue", "decode"]),
    ):
        root = collector.span(call)
        assert (root.trace_id, root.parent_id) == (CONTEXT.trace_id, CONTEXT.span_id)
        assert (root.failed, root.attributes["hackkv.closed_by_caller"]) == ("", False)
        parts = [span for span in collector.spans() if span.parent_id == root.span_id]
        assert sorted(part.name for part in parts) == sorted(names)
        for part in parts:
            assert root.start_ns <= part.start_ns <= part.end_ns <= root.end_ns, part
    (waiting,), (fetch,) = collector.spans("prefill_queue"), collector.spans("fetch")
    assert (fetch.parent_id, fetch.attributes["hackkv.fetched_tokens"]) == (waiting.span_id, 64)
    assert waiting.start_ns <= fetch.start_ns <= fetch.end_ns <= waiting.end_ns
    failures = {span.failed for span in collector.spans("transfer")}
    assert failures == {"", "node_lost"}
    assert {span.service for span in collector.spans()} == {"hackkv-prefill"}
    assert collector.headers[0]["x-key"] == "k"


@pytest.mark.usefixtures("_asked")
async def test_a_call_that_fails_and_one_that_is_closed_are_told_apart(
    collector: Collector, nodes: Nodes, spans: ProcessTracer
) -> None:
    prefill, _ = await nodes.start()
    nodes.fake.error = TransferError("gone")
    with pytest.raises(TransferError):
        [event async for event in prefill.prefill(nouns.prefill_job())]
    nodes.fake.hang = True
    nodes.fake.closed = asyncio.Event()
    events = prefill.prefill(nouns.prefill_job())
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    await nodes.fake.closed.wait()
    await nodes.server.close()
    await spans.close()
    ends = sorted((span.failed, span.attributes["hackkv.closed_by_caller"]) for span in collector.spans("Prefill"))
    assert ends == [("", True), ("TransferError", False)]


async def test_without_a_parent_the_share_decides_and_else_the_parent_does(collector: Collector) -> None:
    for share, parent, recorded in (
        (1.0, None, True),
        (0.0, None, False),
        (0.0, CONTEXT, True),
        (1.0, TraceContext(CONTEXT.trace_id, CONTEXT.span_id, False), False),
    ):
        spans = open_spans(TracesConfig(endpoint=collector.endpoint, sample=share), "router", "r")
        span = spans.begin("call", 1.0, parent)
        assert span.context is not None
        assert span.context.sampled == recorded
        if parent is not None:
            assert (span.context.trace_id, span.context.state) == (parent.trace_id, parent.state)
        span.end(2.0, failure="broken")
        await spans.close()
    assert [span.failed for span in collector.spans("call")] == ["broken"] * 2
    assert {span.end_ns - span.start_ns for span in collector.spans("call")} == {10**9}


async def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    with Collector() as collector:
        endpoint = collector.endpoint
    spans = open_spans(TracesConfig(endpoint=endpoint), "router", "r")
    spans.begin("call", 1.0, None).end(2.0)
    async with asyncio.timeout(240):
        await spans.close()


async def test_where_nothing_is_set_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    spans = open_spans(TracesConfig(), "router", "r")
    assert isinstance(spans, NoSpans)
    node = FakePrefill()
    assert traced_prefill(node, spans) is node
    span = spans.begin("call", 1.0, CONTEXT)
    assert span.child("part", 2.0).context == CONTEXT
    span.end(3.0)
    await spans.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert isinstance(open_spans(TracesConfig(), "router", "r"), NoSpans)


async def test_traced_nodes_pass_everything_on() -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    traced = TracedPrefill(prefill, NoSpans())
    assert await traced.describe() == nouns.node_info("p-1")
    await traced.assign("t-1", 2, "10.0.0.1:7", HeldKv(3, 1))
    assert prefill.assigned == [("t-1", 2, "10.0.0.1:7", HeldKv(3, 1))]
    assert await TracedDecode(decode, NoSpans()).describe() == nouns.node_info()
