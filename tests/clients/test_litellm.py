"""LiteLLM as a library, with this server as an OpenAI-compatible provider."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from conftest import KEY, MODEL

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices while it is imported
import litellm

QUESTION = {"role": "user", "content": "Say something."}


@pytest.fixture
def ask(base_url: str) -> dict[str, Any]:
    """What every call is given."""
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
