"""Thoughts, text and calls are told apart, however the answer is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer import MessageDraft, call_id
from router.api.structured import Thinking
from router.api.tools.parsers import Hermes

CASES = [
    (Thinking.OPEN, "hm\n</think>\n\nyes", "hm\n", "yes"),
    (Thinking.OPEN, "never closed</thin", "never closed</thin", ""),
    (Thinking.MAYBE, "\n<think>a</think> b </think>", "a", "b </think>"),
    (Thinking.MAYBE, "<thin air", "", "<thin air"),
    (Thinking.MAYBE, "<thi", "", "<thi"),
    (Thinking.MAYBE, "plain", "", "plain"),
    (Thinking.NEVER, "<think>a</think>", "", "<think>a</think>"),
]


@pytest.mark.parametrize(("thinking", "text", "thought", "said"), CASES)
@given(places=st.lists(st.integers(0, 40), max_size=8))
def test_thoughts_are_reasoning_content(
    thinking: Thinking, text: str, thought: str, said: str, places: list[int]
) -> None:
    answer = MessageDraft(thinking, None)
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    deltas = [delta for start, end in itertools.pairwise(at) for delta in answer.push(text[start:end], False)]
    deltas += answer.push("", True)
    message = answer.message()
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, said)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.get("content", "") for delta in deltas) == said


def test_a_streamed_call_adds_up_to_the_whole_one() -> None:
    text = '<think>which?</think>\nSo: <tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'
    answer = MessageDraft(Thinking.MAYBE, Hermes(frozenset({"f"})))
    deltas = [delta for char in text for delta in answer.push(char, False)] + answer.push("", True)
    calls: list[dict[str, Any]] = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": [1, 2]}'
    assert [call for call in calls if "id" in call] == [{**calls[0], "index": 0, "type": "function"}]
    message = answer.message()
    assert (message["content"], message["reasoning_content"]) == ("So:", "which?")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": [1, 2]}'}
    assert message["tool_calls"][0]["id"] == calls[0]["id"]


def test_ids_are_of_the_form_that_templates_ask_for() -> None:
    assert call_id().startswith("call_")
    assert len(call_id(9)) == 9
    assert call_id(9).isalnum()
