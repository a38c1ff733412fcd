"""The official client: what every application does, over a conversation of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import openai
import pytest
from conftest import KEY, MODEL, called, prompt_tokens
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "Say something."}


class Clock(BaseModel):
    """Tells the time."""

    zone: Literal["UTC", "CET"]


TOOLS = [openai.pydantic_function_tool(Clock)]
FORCED = {
    "model": MODEL, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "Clock"}},
    "max_tokens": 60, "temperature": 0,
}  # fmt: skip


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    """A client with the key."""
    with OpenAI(api_key=KEY, base_url=base_url, max_retries=0) as client:
        yield client


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="def ", max_tokens=8, temperature=0, logprobs=2)
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens) == 8
    chunks = list(client.completions.create(model=MODEL, prompt="def ", max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_turns_with_the_messages_sent_back(client: OpenAI) -> None:
    messages = [QUESTION]
    for turn in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
        sent = answer.choices[0].message
        messages += [
            sent.model_dump() if turn % 2 else sent,
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
        ]
    assert answer.usage.prompt_tokens > 3 * 6


def test_the_streaming_helper_and_its_message_sent_back(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[QUESTION], max_tokens=6, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=6, temperature=0)
    message = final.choices[0].message
    assert message.content == whole.choices[0].message.content
    client.chat.completions.create(model=MODEL, messages=[QUESTION, message.model_dump(), QUESTION], max_tokens=2)


def _create(client: OpenAI, messages: list[Any]) -> ChatCompletion:
    return client.chat.completions.create(messages=messages, **FORCED)


def _parse(client: OpenAI, messages: list[Any]) -> ChatCompletion:
    return client.chat.completions.parse(messages=messages, **FORCED)


def _stream(client: OpenAI, messages: list[Any]) -> ChatCompletion:
    with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **FORCED) as stream:
        kinds = {event.type for event in stream}
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        return stream.get_final_completion()


@pytest.mark.parametrize("ask", [_create, _parse, _stream])
@pytest.mark.parametrize("dumped", [False, True])
def test_calls_are_made_and_sent_back_with_their_results(
    base_url: str, client: OpenAI, ask: Callable[[OpenAI, list[Any]], ChatCompletion], dumped: bool
) -> None:
    sent: list[ChatCompletionMessage | dict[str, Any]] = [QUESTION]
    meant = [QUESTION]
    for _ in range(3):
        answer = ask(client, sent)
        assert answer.usage.prompt_tokens == prompt_tokens(base_url, meant, TOOLS)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "Clock")
        clock = Clock.model_validate_json(call.function.arguments)
        assert ask is _create or call.function.parsed_arguments == clock
        sent += [message.model_dump() if dumped else message]
        sent += [{"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
        meant += called("Clock", call.function.arguments, "It is noon.")
    said = client.chat.completions.create(model=MODEL, messages=sent, tools=TOOLS, max_tokens=2)
    assert said.usage.prompt_tokens == prompt_tokens(base_url, meant, TOOLS)


@pytest.mark.parametrize("dumped", [False, True])
def test_a_parsed_answer_can_be_sent_back(base_url: str, client: OpenAI, dumped: bool) -> None:
    asked = {"model": MODEL, "response_format": Clock, "max_tokens": 60, "temperature": 0}
    message = client.chat.completions.parse(messages=[QUESTION], **asked).choices[0].message
    assert message.parsed == Clock.model_validate_json(message.content)
    sent = [QUESTION, message.model_dump() if dumped else message, QUESTION]
    answer = client.chat.completions.parse(messages=sent, **asked)
    assert answer.choices[0].message.parsed
    meant = [QUESTION, {"role": "assistant", "content": message.content}, QUESTION]
    assert answer.usage.prompt_tokens == prompt_tokens(base_url, meant)


def test_hints_of_its_signature_pass(client: OpenAI) -> None:
    ask = partial(
        client.chat.completions.create, model=MODEL, messages=[QUESTION], max_completion_tokens=2, temperature=0
    )
    hinted = ask(
        reasoning_effort="low", verbosity="low", store=True, service_tier="flex", user="u", metadata={"a": "b"},
        prediction={"type": "content", "content": "x"}, safety_identifier="s", prompt_cache_key="k",
    )  # fmt: skip
    assert hinted.choices[0].message.content == ask().choices[0].message.content


def test_errors_are_classes_of_its_own(base_url: str, client: OpenAI) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(openai.BadRequestError, match="text only") as refused:
        client.chat.completions.create(model=MODEL, messages=[picture])
    assert refused.value.param == "messages[0].content[0].type"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with OpenAI(api_key="wrong", base_url=base_url, max_retries=0) as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_many_at_once_and_one_that_is_given_up(base_url: str) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(api_key=KEY, base_url=base_url, max_retries=0) as client:
            calls = [
                client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=4, seed=seed)
                for seed in range(8)
            ]
            answers = await asyncio.gather(*calls)
            assert {answer.usage.completion_tokens for answer in answers} <= {1, 2, 3, 4}
            endless = {"ignore_eos": True}
            stream = await client.completions.create(
                model=MODEL, prompt="x", max_tokens=400, stream=True, extra_body=endless
            )
            await anext(stream)
            await stream.close()
            call = asyncio.create_task(
                client.completions.create(model=MODEL, prompt="x", max_tokens=400, extra_body=endless)
            )
            done, _ = await asyncio.wait([call], timeout=0.2)
            call.cancel()
            assert not done or call.result().usage.completion_tokens == 400
            await client.completions.create(model=MODEL, prompt="x", max_tokens=1)  # the server goes on

    asyncio.run(ask())
