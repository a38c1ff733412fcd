"""Calls of tools in each style, read in one piece and cut into pieces at any places."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.tools.machine import CallPiece, Part, Said, ToolParser
from router.api.tools.parsers import Hermes, Llama3, Mistral, Pythonic

NAMES = frozenset({"f", "g.h"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z]{1,4}x", fullmatch=True), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
Calls = list[tuple[str, dict[str, Any]]]


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def llama3(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)


def mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS][{', '.join(_object(call, 'arguments') for call in calls)}]"


def mistral_new(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def pythonic(calls: Calls) -> str:
    return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in calls)}]"


def _object(call: tuple[str, dict[str, Any]], key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]})


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


WRITTEN = [(Hermes, hermes), (Llama3, llama3), (Mistral, mistral), (Mistral, mistral_new), (Pythonic, pythonic)]
PARSERS = sorted({parser for parser, _ in WRITTEN}, key=lambda parser: parser.__name__)
MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *('{"name": "f"', ', "arguments": ', ', "parameters": {', "f(", "g.h(a="),
    *'}{[]()"\\;, \nxé',
)


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls that a parser finds."""
    parts: list[Part] = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    text = "".join(part.text for part in parts if isinstance(part, Said))
    calls = list[tuple[str, str]]()
    for part in parts:
        if isinstance(part, CallPiece):
            if part.index == len(calls):
                calls.append(("", ""))
            name, arguments = calls[part.index]
            assert part.index == len(calls) - 1
            calls[-1] = (name + part.name, arguments + part.arguments)
    return text, calls


def cut(text: str, places: list[int]) -> list[str]:
    """`text` cut at places that may repeat."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(at)]


@pytest.mark.parametrize(("parser", "write"), WRITTEN, ids=lambda value: value.__name__)
@settings(max_examples=100)
@given(calls=CALLS, places=st.lists(st.integers(0, 999), max_size=12), before=st.sampled_from(["", "Let me see. "]))
def test_what_a_model_wrote_is_what_is_called_however_it_is_cut(
    parser: type[ToolParser], write: Any, calls: Calls, places: list[int], before: str
) -> None:
    before = before if parser in (Hermes, Mistral) else ""
    text, found = read(parser(NAMES), cut(before + write(calls), places))
    assert text == before.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(MARKS), max_size=14), places=st.lists(st.integers(0, 99), max_size=12))
def test_no_text_breaks_a_parser_and_no_cut_changes_what_it_finds(
    parser: type[ToolParser], words: list[str], places: list[int]
) -> None:
    text = "".join(words)
    whole = read(parser(NAMES), [text])
    assert read(parser(NAMES), cut(text, places)) == whole
    assert read(parser(NAMES), list(text)) == whole
    assert all(name in NAMES for name, _ in whole[1])
    if not whole[1]:  # Llama's tag says only that a call follows
        assert whole[0].replace("<|python_tag|>", "") == text.replace("<|python_tag|>", "")


@pytest.mark.parametrize(
    ("parser", "text", "said", "calls"),
    [
        (Hermes, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
        (Hermes, "<tool_call>no call</tool_call> after", None, []),
        (Hermes, '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}', "", [("f", '{"a": "</tool_call>"}')]),
        (Hermes, 'a <tool_call>{"name": "f"}</tool_call> b', "a b", [("f", "{}")]),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        (Llama3, '{"city": "Oslo"}', None, []),
        (Llama3, 'Here: {"name": "f", "parameters": {}}', None, []),
        (Mistral, "[TOOL_CALLS]nobody[ARGS]{}", None, []),
        (Pythonic, "[1, 2, 3]", None, []),
        (Pythonic, "[f(1)]", None, []),
        (Pythonic, '[f(a=true, b=null, c="\\ud83d\\ude00")]', "", [("f", '{"a": true, "b": null, "c": "😀"}')]),
        (Pythonic, "[f(a=__import__('os'))]", None, []),
        (Pythonic, f"[f(a={'[' * 500}{']' * 500})]", None, []),
    ],
)
def test_what_is_no_call_is_text(
    parser: type[ToolParser], text: str, said: str | None, calls: list[tuple[str, str]]
) -> None:
    assert read(parser(NAMES), [text]) == (text if said is None else said, calls)


@pytest.mark.parametrize(("parser", "write"), WRITTEN, ids=lambda value: value.__name__)
def test_a_call_that_is_cut_off_leaves_none_of_its_marks_in_the_text(parser: type[ToolParser], write: Any) -> None:
    """This holds for every cut after the client knows of the call."""
    whole, known = write([("f", {"a": "x"})]), 0
    for end in range(len(whole)):
        text, found = read(parser(NAMES), [whole[:end]])
        if found:
            assert text == ""
            known += 1
    assert known
