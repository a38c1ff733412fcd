"""The cost of a request and of a token, as counts: tasks that the router starts, and pieces that it sends.

`python -m bench.router cost` measures the time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hackkv.types import Token
from router.api.chat import ChatRenderer
from router.api.choices import ChoiceCollector, Delta
from router.api.completions import CompletionRenderer
from router.api.reply import to_json
from router.api.schema import ChatRequest, CompletionRequest
from router.api.sse import OpenAiEvents
from router.api.structured import Thinking
from router.api.tokenize import validate
from tests.router.conftest import INSIDE, Inside

pytestmark = INSIDE
LEGS = {"Reply._watch": 1, "Attempt._run_prefill": 1, "Attempt._run_decode": 1}


@contextmanager
def counting_tasks() -> Iterator[Counter[str]]:
    """Counts tasks that the router's own code starts within the block, by the function that they run."""
    loop, started = asyncio.get_running_loop(), Counter[str]()

    def make(loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> Any:
        if work.cr_frame.f_globals["__name__"].startswith("router."):
            started[work.__qualname__] += 1
        return asyncio.Task(work, loop=loop, context=context)

    loop.set_task_factory(make)
    try:
        yield started
    finally:
        loop.set_task_factory(None)


async def sends(api: Inside, **body: Any) -> int:
    """Messages that the application sends in answer to a completion request."""
    data = json.dumps({"prompt": "x", **body}).encode()
    arriving = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if arriving:
            return arriving.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await api.app(scope, receive, send)
    assert sent[0]["status"] == 200
    return len(sent)


@pytest.mark.parametrize("tokens", [2, 9])
async def test_tasks_are_a_requests_and_pieces_are_its_tokens(api: Inside, tokens: int) -> None:
    with counting_tasks() as started:
        assert await sends(api, max_tokens=tokens) == 2
    assert started == LEGS
    with counting_tasks() as started:
        # The head, the tokens, the end of the event stream, and the end of the body.
        assert await sends(api, max_tokens=tokens, stream=True) == 1 + tokens + 1 + 1
    assert started == {**LEGS, "StreamReply._produce": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    texts=st.lists(st.text(st.characters(codec=None)) | st.just("<text>"), min_size=1, max_size=4), usage=st.booleans()
)
@pytest.mark.parametrize("chat", [False, True])
async def test_an_event_that_is_filled_in_is_the_event_that_would_be_written(
    api: Inside, chat: bool, texts: list[str], usage: bool
) -> None:
    options = {"stream_options": {"include_usage": usage}}
    renderer: OpenAiEvents
    if chat:
        asked = json.dumps({"messages": [{"role": "user", "content": "x"}], **options}).encode()
        renderer = ChatRenderer(api.served, validate(ChatRequest, asked, "tiny", False), "<text>", Thinking.NEVER)
    else:
        asked = json.dumps({"prompt": "x", **options}).encode()
        renderer = CompletionRenderer(api.served, validate(CompletionRequest, asked, "tiny", False), "<text>", {}, {})
    choice = ChoiceCollector(0, (1,), api.tokenizer)
    for index, text in enumerate(texts):
        delta = Delta(choice, text, Token(index, 5), None, index == 0)
        first = renderer.written(delta)
        events = [(renderer.frame(event), to_json(event)) for event in renderer.chunks(delta)]
        assert renderer.written(delta) == b"".join(before + event + after for (before, after), event in events)
        assert (b'"role"' in first) == (chat and index == 0)
