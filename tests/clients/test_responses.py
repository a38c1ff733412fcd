"""The official client's newer API: conversations, tools and the streaming helper over /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from conftest import KEY, MODEL
from openai import OpenAI

QUESTION = {"role": "user", "content": "Say something."}
CLOCK = {
    "type": "function", "name": "clock", "strict": True,
    "parameters": {
        "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    """A client with the key."""
    with OpenAI(api_key=KEY, base_url=base_url, max_retries=0) as client:
        yield client


def test_turns_with_the_items_sent_back(client: OpenAI) -> None:
    items = [QUESTION]
    for turn in range(3):
        answer = client.responses.create(model=MODEL, input=items, max_output_tokens=6, temperature=0)
        sent = [item.model_dump() if turn % 2 else item for item in answer.output]
        items += [*sent, {"role": "user", "content": [{"type": "input_text", "text": "?"}]}]
    assert answer.usage.input_tokens > 3 * 6
    assert answer.output_text


def test_the_streaming_helper_says_the_same(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": "Say something.", "max_output_tokens": 6, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.output_text == client.responses.create(**asked).output_text


def test_a_call_is_made_and_its_result_sent(client: OpenAI) -> None:
    asked = {"model": MODEL, "tools": [CLOCK], "max_output_tokens": 60, "temperature": 0}
    answer = client.responses.create(input=[QUESTION], tool_choice={"type": "function", "name": "clock"}, **asked)
    (call,) = answer.output
    assert (call.name, json.loads(call.arguments)["zone"] in ("UTC", "CET")) == ("clock", True)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    assert client.responses.create(input=[QUESTION, *answer.output, result], **asked).status


def test_errors_are_classes_of_its_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not kept") as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="x")
