"""LiteLLM as a library, with this server as an OpenAI-compatible provider."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from conftest import KEY, MODEL, called, prompt_tokens

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise LiteLLM asks GitHub for prices at import
import litellm

QUESTION = {"role": "user", "content": "Say something."}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock", "description": "The time.", "strict": True,
        "parameters": {
            "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture
def ask(base_url: str) -> dict[str, Any]:
    """The arguments of every call."""
    return {
        "model": f"openai/{MODEL}", "api_base": base_url, "api_key": KEY, "max_tokens": 6, "temperature": 0,
        "num_retries": 0,
    }  # fmt: skip


def test_a_completion(ask: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="def ", **{**ask, "model": f"text-completion-openai/{MODEL}"})
    assert answer.choices[0].text


def test_turns_with_the_messages_sent_back(ask: dict[str, Any]) -> None:
    messages: list[Any] = [QUESTION]
    for turn in range(3):
        answer = litellm.completion(messages=messages, **ask)
        sent = answer.choices[0].message
        messages += [sent.model_dump() if turn % 2 else sent, QUESTION]
    assert answer.usage.prompt_tokens > 3 * 6


def test_a_stream_says_the_same_and_can_be_sent_back(ask: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=[QUESTION], stream=True, **ask))
    built = litellm.stream_chunk_builder(chunks, messages=[QUESTION])
    said = built.choices[0].message
    assert said.content == litellm.completion(messages=[QUESTION], **ask).choices[0].message.content
    assert litellm.completion(messages=[QUESTION, said.model_dump(), QUESTION], **ask).choices


def _whole(messages: list[Any], asked: dict[str, Any]) -> litellm.ModelResponse:
    return litellm.completion(messages=messages, **asked)


def _built(messages: list[Any], asked: dict[str, Any]) -> litellm.ModelResponse:
    counted = {"include_usage": True}
    chunks = list(litellm.completion(messages=messages, stream=True, stream_options=counted, **asked))
    return litellm.stream_chunk_builder(chunks, messages=messages)


@pytest.mark.parametrize("answer_to", [_whole, _built])
@pytest.mark.parametrize("dumped", [False, True])
def test_calls_are_made_and_sent_back_with_their_results(
    base_url: str, ask: dict[str, Any], answer_to: Callable[..., litellm.ModelResponse], dumped: bool
) -> None:
    forced = {**ask, "tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    sent: list[Any] = [QUESTION]
    meant = [QUESTION]
    for _ in range(3):
        answer = answer_to(sent, forced)
        assert answer.usage.prompt_tokens == prompt_tokens(base_url, meant, [CLOCK])
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "clock"
        assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
        sent += [message.model_dump() if dumped else message]
        sent += [{"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
        meant += called("clock", call.function.arguments, "It is noon.")
    said = litellm.completion(messages=sent, tools=[CLOCK], **ask)
    assert said.usage.prompt_tokens == prompt_tokens(base_url, meant, [CLOCK])


def test_errors_are_its_own(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="beam search"):
        litellm.completion(messages=[QUESTION], extra_body={"use_beam_search": True}, **ask)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=[QUESTION], **{**ask, "api_key": "wrong"})


def test_many_at_once_and_one_that_is_given_up(ask: dict[str, Any]) -> None:
    async def run() -> None:
        answers = await asyncio.gather(*(litellm.acompletion(messages=[QUESTION], **ask) for _ in range(4)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await litellm.acompletion(messages=[QUESTION], stream=True, **{**ask, "max_tokens": 400})
        await anext(stream)
        await stream.aclose()
        assert (await litellm.acompletion(messages=[QUESTION], **ask)).choices

    asyncio.run(run())
