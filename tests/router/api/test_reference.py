"""docs/api.md has the tables that the routes and models make, and answers match `/openapi.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import applications as openapi
from pydantic import BaseModel

from router.api import description
from router.api.answers import ChatCompletion, ChatCompletionChunk, Completion
from router.api.reference import reference
from tests.router.api.test_http import events
from tests.router.conftest import INSIDE, Api, Inside

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_tables_in_the_documents_are_those_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.endswith(f"\n\n{reference()}\n"), "paste the output of `python -m router.api.reference`"


@pytest.mark.parametrize("more", [{}, {"return_stages": True, "n": 2}, {"stop": "q", "temperature": 0}])
@pytest.mark.parametrize(
    ("route", "body", "whole", "event"),
    [
        (
            "/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "return_token_ids": True}, Completion,
            Completion,
        ),
        (
            "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, ChatCompletion,
            ChatCompletionChunk,
        ),
    ],
    ids=["completions", "chat"],
)  # fmt: skip
async def test_answers_have_the_described_fields_and_no_other(
    api: Api, route: str, body: dict[str, Any], whole: type[BaseModel], event: type[BaseModel], more: dict[str, Any]
) -> None:
    asked = {**body, **more, "max_tokens": 4}
    whole.model_validate((await api.http.post(route, json=asked)).json())
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    for data in events(await api.http.post(route, json=streamed))[:-1]:
        event.model_validate(data)


@INSIDE
async def test_the_document_is_made_before_anyone_asks(api: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it holds up the event loop for longer than a token takes."""

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(openapi, "get_openapi", too_late)
    monkeypatch.setattr(description, "get_openapi", too_late)
    assert (await api.http.get("/openapi.json")).status_code == 200


async def test_the_document_asks_for_a_key_only_where_one_is_needed(api: Api) -> None:
    document = (await api.http.get("/openapi.json")).json()
    assert "securitySchemes" not in document["components"]
    assert all("422" not in one["responses"] for path in document["paths"].values() for one in path.values())
