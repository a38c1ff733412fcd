"""W3C trace contexts as headers, and the trail that travels with a call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.types import PrefillEvent, PrefillJob
from tests.transport import nouns
from tests.transport.fakes import FakePrefill
from transport.channels import ChannelPool
from transport.rpc_client import PrefillClient
from transport.rpc_server import RpcServer
from transport.trail import MAX_STATE, TRAIL, NoSpan, TraceContext, Trail, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
digits = st.sampled_from("0123456789abcdef")


def hexadecimal(length: int) -> st.SearchStrategy[str]:
    return st.text(digits, min_size=length, max_size=length).filter(lambda text: int(text, 16) > 0)


@given(hexadecimal(32), hexadecimal(16), st.booleans())
def test_a_context_is_read_as_it_is_written(trace_id: str, span_id: str, sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, sampled)
    assert read_traceparent(context.traceparent) == context
    assert read_traceparent(f" {context.traceparent}", "a=1,b=2") == TraceContext(trace_id, span_id, sampled, "a=1,b=2")


@given(st.text())
def test_whatever_comes_is_read_or_left_alone(text: str) -> None:
    context = read_traceparent(text, text)
    assert context is None or len(context.trace_id) == 32


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_only_what_the_standard_allows_is_a_context(header: str, sampled: bool | None) -> None:
    context = read_traceparent(header)
    assert (context and context.sampled) == sampled


@pytest.mark.parametrize("state", ["", "x" * (MAX_STATE + 1), "a=\n1", "a=é"])
def test_a_state_that_cannot_go_on_is_dropped(state: str) -> None:
    assert read_traceparent(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True)


class Noticing(FakePrefill):
    """Records the trail of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Trail] = []

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        self.seen.append(TRAIL.get())
        async for event in super().prefill(job):
            yield event


async def test_the_trail_goes_along_with_calls_over_the_network(server: RpcServer, channels: ChannelPool) -> None:
    node = Noticing()
    server.add_prefill(node)
    client = PrefillClient(await server.start(), channels)
    context = TraceContext(TRACE, SPAN, True, "a=1")
    trails = [Trail(), Trail("chatcmpl-1-0"), Trail("chatcmpl-2-0", NoSpan(context)), Trail()]
    for trail in trails:
        token = TRAIL.set(trail)
        assert [event async for event in client.prefill(nouns.prefill_job())]
        TRAIL.reset(token)
    assert node.seen == trails
