"""Anthropic's client over /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from conftest import KEY, MODEL

GREEDY = {"temperature": 0}
"""Sent in `extra_body`, since this package's signatures no longer have the setting."""
QUESTION = {"role": "user", "content": "Say something."}
CLOCK = {
    "name": "clock", "description": "The time.",
    "input_schema": {
        "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def root(base_url: str) -> str:
    """The base URL for this client, which is without /v1."""
    return base_url.removesuffix("/v1")


@pytest.fixture
def client(root: str) -> Iterator[Anthropic]:
    """A client with the key."""
    with Anthropic(api_key=KEY, base_url=root, max_retries=0) as client:
        yield client


def test_turns_with_the_blocks_sent_back(client: Anthropic) -> None:
    messages = [QUESTION]
    for turn in range(3):
        asked = {"messages": messages, "system": "Be short.", "max_tokens": 6, "extra_body": GREEDY}
        answer = client.messages.create(model=MODEL, **asked)
        content = [block.model_dump() for block in answer.content] if turn % 2 else answer.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "More."}]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 3 * 6
    counted = client.messages.count_tokens(model=MODEL, messages=messages[:-2], system="Be short.")
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_streaming_helper_says_the_same(client: Anthropic) -> None:
    asked = {"model": MODEL, "messages": [QUESTION], "max_tokens": 6, "extra_body": GREEDY}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert text == "".join(block.text for block in whole.content)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_call_is_made_and_its_result_sent(client: Anthropic) -> None:
    asked = {"model": MODEL, "tools": [CLOCK], "max_tokens": 60, "extra_body": GREEDY}
    answer = client.messages.create(messages=[QUESTION], tool_choice={"type": "tool", "name": "clock"}, **asked)
    (call,) = answer.content
    assert (answer.stop_reason, call.name) == ("tool_use", "clock")
    assert call.input["zone"] in ("UTC", "CET")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **asked).stop_reason


def test_errors_are_classes_of_its_own(root: str, client: Anthropic) -> None:
    picture = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,"}}]}
    with pytest.raises(anthropic.BadRequestError, match="this model takes text"):
        client.messages.create(model=MODEL, messages=[picture], max_tokens=1)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=[QUESTION], max_tokens=1)
    with (
        Anthropic(api_key="wrong", base_url=root, max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(model=MODEL, messages=[QUESTION], max_tokens=1)


def test_many_at_once_and_one_that_is_given_up(root: str) -> None:
    async def ask() -> None:
        async with AsyncAnthropic(api_key=KEY, base_url=root, max_retries=0) as client:
            asked = {"model": MODEL, "messages": [QUESTION]}
            calls = (client.messages.create(max_tokens=4, extra_body=GREEDY, **asked) for _ in range(4))
            answers = await asyncio.gather(*calls)
            assert len({answer.content[0].text for answer in answers}) == 1
            endless = {"ignore_eos": True}
            async with client.messages.stream(max_tokens=400, extra_body=endless, **asked) as stream:
                await anext(aiter(stream))
            assert (await client.messages.create(max_tokens=1, **asked)).usage.output_tokens == 1

    asyncio.run(ask())
