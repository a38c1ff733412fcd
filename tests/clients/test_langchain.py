"""LangChain's chat model and completion model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from conftest import KEY, MODEL, called, prompt_tokens
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import BadRequestError
from pydantic import BaseModel

QUESTION = HumanMessage("Say something.")
MEANT = {"role": "user", "content": "Say something."}


class Clock(BaseModel):
    """Tells the time."""

    zone: Literal["UTC", "CET"]


TOOLS = [convert_to_openai_tool(Clock, strict=True)]


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    """A chat model with the key."""
    return ChatOpenAI(model=MODEL, api_key=KEY, base_url=base_url, max_tokens=6, temperature=0, max_retries=0)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def either(request: pytest.FixtureRequest, base_url: str) -> ChatOpenAI:
    """A chat model over one of the two routes that LangChain knows, with enough tokens for a call."""
    return ChatOpenAI(
        model=MODEL, api_key=KEY, base_url=base_url, max_tokens=60, temperature=0, max_retries=0, stream_usage=True,
        use_responses_api=request.param,
    )  # fmt: skip


def test_a_completion(base_url: str) -> None:
    model = OpenAI(model=MODEL, api_key=KEY, base_url=base_url, max_tokens=6, temperature=0, max_retries=0)
    text = model.invoke("def ")
    assert text
    assert "".join(model.stream("def ")) == text


def test_turns_with_the_messages_sent_back(chat: ChatOpenAI) -> None:
    messages = [SystemMessage([{"type": "text", "text": "Be short."}]), QUESTION]
    for _ in range(3):
        answer = chat.invoke(messages)
        assert isinstance(answer, AIMessage)
        messages += [answer, HumanMessage([{"type": "text", "text": "More.", "cache_control": {"type": "ephemeral"}}])]
    assert answer.usage_metadata["input_tokens"] > 3 * 6


def test_a_stream_says_the_same_and_can_be_sent_back(chat: ChatOpenAI) -> None:
    whole, *rest = list(chat.stream([QUESTION]))
    for chunk in rest:
        whole += chunk
    assert whole.content == chat.invoke([QUESTION]).content
    assert chat.invoke([QUESTION, whole, QUESTION]).content is not None


Ask = Callable[[Runnable[Any, Any], list[BaseMessage]], AIMessage]


def _whole(model: Runnable[Any, Any], messages: list[BaseMessage]) -> AIMessage:
    return model.invoke(messages)


def _streamed(model: Runnable[Any, Any], messages: list[BaseMessage]) -> AIMessage:
    whole, *rest = model.stream(messages)
    assert rest
    for chunk in rest:
        whole += chunk
    return whole


@pytest.mark.parametrize("ask", [_whole, _streamed])
def test_calls_are_made_and_sent_back_with_their_results(base_url: str, either: ChatOpenAI, ask: Ask) -> None:
    forced = either.bind_tools([Clock], tool_choice="any", strict=True, parallel_tool_calls=False)
    sent: list[BaseMessage] = [QUESTION]
    meant = [MEANT]
    for _ in range(3):
        answer = ask(forced, sent)
        assert answer.usage_metadata["input_tokens"] == prompt_tokens(base_url, meant, TOOLS)
        (call,) = answer.tool_calls
        assert call["name"] == "Clock"
        Clock.model_validate(call["args"])
        sent += [answer, ToolMessage("It is noon.", tool_call_id=call["id"])]
        meant += called("Clock", json.dumps(call["args"]), "It is noon.")
    said = ask(either.model_copy(update={"max_tokens": 2}).bind_tools([Clock], strict=True), sent)
    assert said.usage_metadata["input_tokens"] == prompt_tokens(base_url, meant, TOOLS)


@pytest.mark.parametrize("tokens", [18, 22, 25])
@pytest.mark.parametrize("ask", [_whole, _streamed])
def test_a_call_that_was_cut_off_can_be_sent_back(base_url: str, either: ChatOpenAI, ask: Ask, tokens: int) -> None:
    """LangChain keeps the arguments of such a call as text, or parses them as far as possible."""
    short, long = (
        model.bind_tools([Clock], tool_choice="Clock", strict=True)
        for model in (either.model_copy(update={"max_tokens": tokens}), either)
    )
    cut = ask(short, [QUESTION])
    assert cut.usage_metadata["output_tokens"] == tokens
    (call,) = cut.tool_calls + cut.invalid_tool_calls
    answer = ask(long, [QUESTION, cut, ToolMessage("What?", tool_call_id=call["id"])])
    assert answer.tool_calls
    text = call["args"] if isinstance(call["args"], str) else json.dumps(call["args"])
    zone = re.search('{"zone": "([A-Z]*)', text)
    read = json.dumps({"zone": zone[1]} if zone else {})
    tokens_shown = prompt_tokens(base_url, [MEANT, *called("Clock", read, "What?")], TOOLS)
    assert answer.usage_metadata["input_tokens"] == tokens_shown


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(
    base_url: str, either: ChatOpenAI, method: Literal["function_calling", "json_schema"]
) -> None:
    structured = either.with_structured_output(Clock, method=method, strict=True, include_raw=True)
    first = structured.invoke([QUESTION])
    assert (type(first["parsed"]), first["parsing_error"]) == (Clock, None)
    *_, streamed = either.with_structured_output(Clock, method=method, strict=True).stream([QUESTION])
    assert streamed == first["parsed"]
    if method == "function_calling":
        (call,) = first["raw"].tool_calls
        answered = [ToolMessage("It is noon.", tool_call_id=call["id"])]
        meant, tools = called("Clock", json.dumps(call["args"]), "It is noon."), TOOLS
    else:
        assert Clock.model_validate_json(first["raw"].text) == first["parsed"]
        answered, meant, tools = [], [{"role": "assistant", "content": first["raw"].text}], []
    second = structured.invoke([QUESTION, first["raw"], *answered, QUESTION])
    assert type(second["parsed"]) is Clock
    tokens = second["raw"].usage_metadata["input_tokens"]
    assert tokens == prompt_tokens(base_url, [MEANT, *meant, MEANT], tools)


def test_errors_are_the_clients(chat: ChatOpenAI) -> None:
    with pytest.raises(BadRequestError, match="text only"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}])])
    with pytest.raises(BadRequestError, match="beam search"):
        chat.bind(extra_body={"use_beam_search": True}).invoke([QUESTION])


def test_a_batch_and_one_that_is_given_up(chat: ChatOpenAI) -> None:
    async def ask() -> None:
        assert len(await chat.abatch([[QUESTION]] * 4)) == 4
        stream = chat.bind(max_tokens=400).astream([QUESTION])
        await anext(stream)
        await stream.aclose()
        assert await chat.ainvoke([QUESTION])

    asyncio.run(ask())
