"""A stream has the same bytes whether an event is written at once, has to wait, or waits behind other events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.api.connection import WRITE
from tests.router.conftest import INSIDE, Inside

pytestmark = INSIDE


async def streamed(api: Inside, writable: list[bool], rounds: list[int], tokens: int) -> tuple[bytes, int]:
    """The body of a stream, and how many pieces of it were written at once. `writable` says for each piece whether that
    is possible. `rounds` says for how many rounds of the event loop each `send` waits. Both repeat."""
    data = json.dumps({"prompt": "x", "max_tokens": tokens, "seed": 1, "stream": True, "logprobs": 1}).encode()
    arriving = [{"type": "http.request", "body": data, "more_body": False}]
    body, calls, at_once, sends = bytearray(), 0, 0, 0

    def write(piece: bytes) -> bool:
        nonlocal calls, at_once
        calls += 1
        if not writable[calls % len(writable)]:
            return False
        at_once += 1
        body.extend(piece)
        return True

    async def receive() -> Any:
        return arriving.pop() if arriving else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal sends
        sends += 1
        for _ in range(rounds[sends % len(rounds)]):
            await asyncio.sleep(0)
        body.extend(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers,
        "extensions": {WRITE: write},
    }  # fmt: skip
    await api.app(scope, receive, send)
    return bytes(body), at_once


def texts(body: bytes) -> list[Any]:
    """The choices of each event."""
    *events, end, nothing = body.split(b"\n\n")
    assert (end, nothing) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: "))["choices"] for event in events]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    writable=st.lists(st.booleans(), min_size=1, max_size=6),
    rounds=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    tokens=st.integers(1, 12),
)
async def test_no_event_is_lost_doubled_or_out_of_order(
    api: Inside, writable: list[bool], rounds: list[int], tokens: int
) -> None:
    api.cluster.script.answer = lambda request: [97] * request.sampling.max_tokens
    whole, _ = await streamed(api, [False], [0], tokens)
    body, _ = await streamed(api, writable, rounds, tokens)
    assert texts(body) == texts(whole)
    assert len(texts(body)) == tokens


async def test_tokens_in_the_middle_are_written_at_once(api: Inside) -> None:
    api.cluster.script.answer = lambda request: [97] * request.sampling.max_tokens
    _, at_once = await streamed(api, [True], [0], 9)
    assert at_once == 7  # the first event comes with the head, and the last may repeat all others
