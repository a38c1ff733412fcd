"""LangChain's chat model and completion model."""

from __future__ import annotations

import asyncio

import pytest
from conftest import KEY, MODEL
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from openai import BadRequestError

QUESTION = HumanMessage("Say something.")


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    """A chat model with the key."""
    return ChatOpenAI(model=MODEL, api_key=KEY, base_url=base_url, max_tokens=6, temperature=0, max_retries=0)


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
