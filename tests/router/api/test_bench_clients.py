"""Requests exactly as other projects' load generators send them. `docs/bench-serve.md` says which were run whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.router.conftest import Api

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
TOKENS = 6


@dataclass(frozen=True, slots=True)
class Sent:
    """The body that a client posts, and the headers that it sets."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


CLIENTS = {
    "vllm bench serve, openai": Sent(
        COMPLETIONS,
        {"prompt": "the fox", "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None}
        | {"stream_options": USAGE, "ignore_eos": True, "temperature": 0.0},
        {"x-request-id": "bench-0"},
    ),
    "vllm bench serve, openai-chat": Sent(
        CHAT,
        {"messages": PARTS, "max_completion_tokens": TOKENS, "stream_options": USAGE, "ignore_eos": True},
        {"x-request-id": "bench-0"},
    ),
    "guidellm 0.8, completions": Sent(
        COMPLETIONS,
        {"prompt": "the fox", "stream_options": CONTINUOUS, "max_tokens": TOKENS, "stop": None, "ignore_eos": True},
        {},
    ),
    "guidellm 0.8, chat": Sent(
        CHAT,
        {"messages": PARTS, "stream_options": CONTINUOUS, "max_completion_tokens": TOKENS}
        | {"stop": None, "ignore_eos": True},
        {},
    ),
    "aiperf 0.13, completions": Sent(
        COMPLETIONS,
        {"prompt": ["the fox"], "max_tokens": TOKENS, "ignore_eos": True, "min_tokens": TOKENS}
        | {"stream_options": USAGE},
        {"accept": "text/event-stream", "x-correlation-id": "0"},
    ),
    "aiperf 0.13, chat": Sent(
        CHAT,
        {"messages": [{"role": "user", "name": "a", "content": "the fox"}], "max_completion_tokens": TOKENS}
        | {"ignore_eos": True, "min_tokens": TOKENS, "stream_options": CONTINUOUS},
        {"accept": "text/event-stream", "x-correlation-id": "0"},
    ),
}


@pytest.mark.parametrize("sent", CLIENTS.values(), ids=CLIENTS)
async def test_load_generators_of_others_are_served_as_they_are(api: Api, sent: Sent) -> None:
    response = await api.http.post(sent.path, json={"model": "tiny", "stream": True, **sent.body}, headers=sent.headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = (line.removeprefix("data: ") for line in response.text.split("\n\n") if line)
    assert done == "[DONE]"
    *chunks, closing = map(json.loads, events)
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == TOKENS
    assert len(chunks) == TOKENS + (sent.path == CHAT)  # a chat says why it ended in an event of its own
    counts = [chunk["usage"] for chunk in chunks]
    if sent.body["stream_options"] == CONTINUOUS:
        assert [count["completion_tokens"] for count in counts[:TOKENS]] == list(range(1, TOKENS + 1))
        assert counts[-1] == closing["usage"]
    else:
        assert counts == [None] * len(chunks)
