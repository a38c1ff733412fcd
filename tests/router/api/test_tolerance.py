"""Applications also send their history as they got it, hints, and values that ask for nothing. All are accepted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from router.api.fields import Ignored, Refused
from router.api.messages.schema import (
    CallBlock,
    Conversation,
    CountRequest,
    CustomTool,
    MessagesRequest,
    OutputConfig,
    ResultBlock,
    TextBlock,
    ThoughtBlock,
)
from router.api.responses.schema import (
    CallItem,
    EventOptions,
    FunctionTool,
    ItemPart,
    MessageItem,
    ResponsesRequest,
    ResultItem,
    TextOptions,
    ThoughtItem,
)
from router.api.schema import ChatRequest, CompletionRequest, Message, StreamOptions, TextPart
from router.api.texts import TokenizeRequest
from router.api.tools.fields import CalledFunction
from tests.router.conftest import Api, check_error

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
QUESTION = {"role": "user", "content": "hi"}
SHORT = {"max_tokens": 1}
BRIEF = {"max_output_tokens": 1}
CLOCK = {"type": "function", "name": "clock", "parameters": None}
PART = {"type": "text", "text": "hi"}
VALUES: list[object] = [True, 0, -3, 1.5, "", "x", [], [1], {}, {"a": [None]}]

CALLED = {"type": "tool_use", "id": "1", "name": "clock", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "noon"}


def blocks(*each: dict[str, Any]) -> dict[str, Any]:
    """A body of /v1/messages with one block in each message. The first message is an assistant's."""
    roles = itertools.cycle(["assistant", "user"])
    return {"messages": [{"role": role, "content": [block]} for role, block in zip(roles, each, strict=False)], **SHORT}


Place = tuple[str, dict[str, Any], list[str | int], str]
"""A route, a body that it serves, the path to one of the body's objects, and that path as errors write it."""

PLACES: dict[type[BaseModel], Place] = {
    CompletionRequest: (COMPLETIONS, {"prompt": "x", **SHORT}, [], ""),
    ChatRequest: (CHAT, {"messages": [QUESTION], **SHORT}, [], ""),
    StreamOptions: (
        CHAT, {"messages": [QUESTION], "stream_options": {}, **SHORT}, ["stream_options"], "stream_options.",
    ),
    Message: (CHAT, {"messages": [QUESTION], **SHORT}, ["messages", 0], "messages[0]."),
    TextPart: (
        CHAT, {"messages": [QUESTION, {"role": "user", "content": [PART]}], **SHORT}, ["messages", 1, "content", 0],
        "messages[1].content[0].",
    ),
    CalledFunction: (
        CHAT,
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "clock", "arguments": "{}"}}]},
            ],
            **SHORT,
        },
        ["messages", 1, "tool_calls", 0, "function"], "messages[1].tool_calls[0].function.",
    ),
    ResponsesRequest: (RESPONSES, {"input": "x", **BRIEF}, [], ""),
    EventOptions: (RESPONSES, {"input": "x", "stream_options": {}, **BRIEF}, ["stream_options"], "stream_options."),
    TextOptions: (RESPONSES, {"input": "x", "text": {}, **BRIEF}, ["text"], "text."),
    FunctionTool: (RESPONSES, {"input": "x", "tools": [CLOCK], **BRIEF}, ["tools", 0], "tools[0]."),
    MessageItem: (RESPONSES, {"input": [QUESTION], **BRIEF}, ["input", 0], "input[0]."),
    ItemPart: (
        RESPONSES, {"input": [{**QUESTION, "content": [{"type": "input_text", "text": "x"}]}], **BRIEF},
        ["input", 0, "content", 0], "input[0].content[0].",
    ),
    CallItem: (
        RESPONSES,
        {"input": [QUESTION, {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"}], **BRIEF},
        ["input", 1], "input[1].",
    ),
    ResultItem: (
        RESPONSES, {"input": [QUESTION, {"type": "function_call_output", "call_id": "1", "output": "x"}], **BRIEF},
        ["input", 1], "input[1].",
    ),
    ThoughtItem: (RESPONSES, {"input": [QUESTION, {"type": "reasoning"}], **BRIEF}, ["input", 1], "input[1]."),
    Conversation: (MESSAGES, {"messages": [QUESTION], **SHORT}, [], ""),
    MessagesRequest: (MESSAGES, {"messages": [QUESTION], **SHORT}, [], ""),
    OutputConfig: (
        MESSAGES, {"messages": [QUESTION], "output_config": {}, **SHORT}, ["output_config"], "output_config.",
    ),
    CustomTool: (
        MESSAGES, {"messages": [QUESTION], "tools": [{"name": "clock", "input_schema": {}}], **SHORT}, ["tools", 0],
        "tools[0].",
    ),
    TextBlock: (
        MESSAGES, {"messages": [{**QUESTION, "content": [PART]}], **SHORT}, ["messages", 0, "content", 0],
        "messages[0].content[0].",
    ),
    CallBlock: (MESSAGES, blocks(CALLED, RESULT), ["messages", 0, "content", 0], "messages[0].content[0]."),
    ResultBlock: (MESSAGES, blocks(CALLED, RESULT), ["messages", 1, "content", 0], "messages[1].content[0]."),
    ThoughtBlock: (
        MESSAGES, blocks({"type": "thinking"}, RESULT), ["messages", 0, "content", 0], "messages[0].content[0].",
    ),
    TokenizeRequest: ("/tokenize", {"prompt": "x"}, [], ""),
}  # fmt: skip
Fields = list[tuple[str, Ignored | Refused]]
FIELDS: dict[type[BaseModel], Fields] = {
    model: [
        (name, kind)
        for name, field in model.model_fields.items()
        for kind in field.metadata
        if isinstance(kind, Ignored | Refused)
    ]
    for model in PLACES
}
every_field = pytest.mark.parametrize(("model", "fields"), FIELDS.items(), ids=[model.__name__ for model in FIELDS])


def body_with(model: type[BaseModel], name: str, value: object) -> tuple[str, dict[str, Any], str]:
    """A route, a body in which a field has a value, and the field's place."""
    route, body, way, prefix = PLACES[model]
    body = json.loads(json.dumps(body))
    inner: Any = body
    for step in way:
        inner = inner[step]
    inner[name] = value
    return route, body, prefix + name


def place_of(route: str, response: httpx.Response) -> object:
    """The place that an error names. Anthropic's errors name it in the message alone."""
    error = response.json()["error"]
    return error["message"].partition(": ")[0] if route == MESSAGES else error["param"]


def accepted(kind: Ignored | Refused) -> Iterator[object]:
    """Values that a field takes."""
    yield from VALUES if isinstance(kind, Ignored) else kind.neutral


@every_field
async def test_a_field_is_ignored_or_refused_as_its_annotation_says(
    api: Api, model: type[BaseModel], fields: Fields
) -> None:
    for name, kind in fields:
        for value in (None, *accepted(kind)):
            route, body, _ = body_with(model, name, value)
            assert (await api.http.post(route, json=body)).status_code == 200, (name, value)
        if isinstance(kind, Refused):
            route, body, place = body_with(model, name, {"surely": "not neutral"})
            response = await api.http.post(route, json=body)
            assert (response.status_code, place_of(route, response)) == (400, place)
            assert response.json()["error"]["message"] == f"{place}: {kind.advice}; leave it out"


@every_field
@pytest.mark.parametrize("settings", [{"strict": True}])
async def test_a_strict_router_takes_no_field_that_has_no_effect(
    api: Api, model: type[BaseModel], fields: Fields
) -> None:
    for name, kind in fields:
        route, body, _ = body_with(model, name, None)
        assert (await api.http.post(route, json=body)).status_code == 200, name
        for value in accepted(kind):
            route, body, place = body_with(model, name, value)
            response = await api.http.post(route, json=body)
            assert (response.status_code, place_of(route, response)) == (400, place)
            assert "strict" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountRequest),
    ],
    ids=["completions", "chat", "responses", "messages", "count_tokens"],
)
def test_every_field_of_the_clients_is_known(sent: type, known: type[BaseModel]) -> None:
    assert sent.__annotations__.keys() - known.model_fields.keys() == set()


async def test_an_answer_can_be_sent_back_as_the_client_dumps_it(api: Api) -> None:
    messages: list[Any] = [QUESTION]
    for _ in range(2):
        answer = await api.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": [PART, PART]}]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    await api.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    prompts = [job.request.prompt_ids for job in api.cluster.jobs]
    prompt = api.tokenizer.decode(max(prompts, key=len), skip_special_tokens=False)
    turns = ["user:hi", *(turn for text in said for turn in (f"assistant:{text}", "user:hi\nhi")), "assistant:"]
    assert prompt == "".join(f"<|turn|>{turn}" for turn in turns)


ECHOES: list[dict[str, Any]] = [
    {"content": "x", "annotations": [], "refusal": None, "audio": None, "function_call": None, "tool_calls": None},
    {"content": "x", "provider_specific_fields": {"refusal": None}, "tool_calls": [], "images": [], "name": "Bo"},
    {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "reasoning_content": "hm"},
    {"content": None, "refusal": "x", "thinking_blocks": [{"type": "thinking"}]},
    {"content": [{"type": "refusal", "refusal": "x"}]},
]


@pytest.mark.parametrize("echo", ECHOES, ids=range(len(ECHOES)))
async def test_answers_of_other_servers_mean_what_they_say(api: Api, echo: dict[str, Any]) -> None:
    body = {"messages": [QUESTION, {"role": "assistant", **echo}, QUESTION], "max_tokens": 1}
    assert (await api.http.post(CHAT, json=body)).status_code == 200
    prompt = api.tokenizer.decode(api.cluster.jobs[0].request.prompt_ids, False)
    assert prompt == "<|turn|>user:hi<|turn|>assistant:x<|turn|>user:hi<|turn|>assistant:"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
async def test_every_role_may_speak_in_parts_of_text_only(api: Api, role: str) -> None:
    parts: list[dict[str, Any]] = [PART, PART]
    body = {"messages": [{"role": role, "content": parts}], "max_tokens": 1}
    assert (await api.http.post(CHAT, json=body)).status_code == 200
    parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}})
    error = check_error(await api.http.post(CHAT, json=body), 400)
    assert error["param"] == "messages[0].content[2].type"
    assert "this model takes text only" in error["message"]


async def test_stream_options_and_no_top_logprobs_mean_nothing_by_themselves(api: Api) -> None:
    body = {"messages": [QUESTION], "max_tokens": 1, "stream_options": {"include_usage": True}, "top_logprobs": 0}
    answer = await api.http.post(CHAT, json=body)
    assert answer.json()["choices"][0]["logprobs"] is None


async def test_a_misspelt_field_is_told_its_name(api: Api) -> None:
    for name, meant in (("max_tokenz", "; did you mean max_tokens?"), ("zzz", "")):
        error = check_error(await api.http.post(COMPLETIONS, json={"prompt": "x", name: 3}), 400)
        assert (error["param"], error["message"]) == (name, f"unknown field: {name}{meant}")


@pytest.mark.parametrize(
    ("path", "misspelt", "meant"),
    [
        (CHAT, "mesages", "messages"),
        (MESSAGES, "mesages", "messages"),
        (COMPLETIONS, "promt", "prompt"),
        (RESPONSES, "inputs", "input"),
    ],
)
async def test_a_required_field_that_is_misspelt_is_not_said_to_be_missing(
    api: Api, path: str, misspelt: str, meant: str
) -> None:
    answer = await api.http.post(path, json={misspelt: "hi", "max_tokens": 1, "model": "hackkv-small"})
    assert answer.status_code == 400
    assert f"unknown field: {misspelt}; did you mean {meant}?" in answer.json()["error"]["message"]


async def test_a_whole_number_may_be_written_with_a_point(api: Api) -> None:
    body = {"prompt": [65.0, 66], "max_tokens": 2.0, "n": 1.0, "seed": 3.0, "stop_token_ids": [9.0]}
    assert (await api.http.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 2
    check_error(await api.http.post(COMPLETIONS, json={**body, "n": 1.5}), 400)
