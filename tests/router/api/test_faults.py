"""Errors name a field as the client wrote it, without the kinds of a union, and suggest the field that was meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from router.api.faults import from_validation
from router.api.fields import is_tag
from router.api.parser import KINDS
from tests.router.conftest import Api, check_error

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
WRONG: list[object] = [None, True, -3, 1.5, "autto", [], [None], [[-1]], {}, {"type": "allowed_tools"}, {"nam": "f"}]
QUESTION = {"role": "user", "content": "hi"}


def wrong_values(annotation: Any) -> Iterator[object]:
    """Values for a field with that annotation, which are odd or wrong themselves or at a place inside."""
    yield from WRONG
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
        kinds = {name: get_args(kind)[0] for name, kind in fields.items() if get_origin(kind) is Literal}
        for name, kind in fields.items():
            yield from ({**kinds, name: value} for value in wrong_values(kind))
        return
    origin, kinds_of = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return
    for each in kinds_of[:1] if origin in (Annotated, list, tuple) else kinds_of:
        yield from ([value] if origin in (list, tuple) else value for value in wrong_values(each))


def holds(value: object, step: str | int) -> bool:
    """Whether a step leads into a value."""
    return step in value if isinstance(value, dict) else isinstance(value, list) and step in range(len(value))


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_no_place_of_an_error_names_a_kind(kind: type[BaseModel]) -> None:
    """Every step of the place exists in the body. Only the last step may lead to a missing field."""
    refused = 0
    for body in wrong_values(kind):
        try:
            kind.model_validate_json(json.dumps(body))
        except ValidationError as found:
            error, refused = found, refused + 1
        else:
            continue
        assert from_validation(error, kind).param != ""
        for each in error.errors(include_url=False):
            place: list[str | int] = [step for step in each["loc"] if not is_tag(step)]
            if each["type"] == "missing":
                place.pop()
            value: Any = body
            for step in place:
                assert holds(value, step), (each, body)
                value = value[step]
    assert refused > 50


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tool_choice": "autto"}, "tool_choice"),
    (CHAT, {"tool_choice": 3}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    (CHAT, {"tool_choice": {"type": "custom"}}, "tool_choice.type"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        CHAT,
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}},
        "tool_choice.allowed_tools.mode",
    ),
    (CHAT, {"guided_json": 3}, "guided_json"),
    (CHAT, {"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    (COMPLETIONS, {"prompt": [[1], [2, 99999999]]}, "prompt[1]"),
]


@pytest.mark.parametrize(("path", "fields", "param"), FAULTS)
async def test_the_field_is_named_as_it_was_sent(api: Api, path: str, fields: dict[str, Any], param: str) -> None:
    body = fields if path == COMPLETIONS else {"messages": [QUESTION], **fields}
    error = check_error(await api.http.post(path, json=body), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


async def test_a_bad_token_is_told_with_its_place(api: Api) -> None:
    for prompt, place in (
        ([1, 2, 99999999], "prompt: 99999999 at index 2"),
        ([[1], [2, 99999999]], "prompt[1]: 99999999 at index 1"),
    ):
        error = check_error(await api.http.post(COMPLETIONS, json={"prompt": prompt}), 400)
        assert error["message"].startswith(f"{place} is not a token id")
    error = check_error(await api.http.post("/detokenize", json={"tokens": [1, 99999999]}), 400)
    assert error["message"].startswith("tokens: 99999999 at index 1 is not a token id")


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"stream_options": {"include_usag": True}}, "stream_options.include_usag", "stream_options.include_usage"),
    (
        CHAT, {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "tools[0].function.paramters", "tools[0].function.parameters",
    ),
    (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_contrl": 1}]}]},
        "messages[0].content[0].cache_contrl", "messages[0].content[0].cache_control",
    ),
    (
        CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schem": {}}}},
        "response_format.json_schema.schem", "response_format.json_schema.schema",
    ),
    (CHAT, {"structured_outputs": {"jsn": 1}}, "structured_outputs.jsn", "structured_outputs.json"),
    (
        CHAT, {"tool_choice": {"type": "function", "function": {"nam": "f"}}},
        "tool_choice.function.nam", "tool_choice.function.name",
    ),
    (RESPONSES, {"input": [QUESTION, {**CALL, "argumnts": 1}]}, "input[1].argumnts", "input[1].arguments"),
    (RESPONSES, {"input": "x", "tool_choice": {"type": "function", "nam": 1}}, "tool_choice.nam", "tool_choice.name"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "misspelt", "meant"), MISSPELT)
async def test_a_misspelt_field_is_told_its_name_at_any_depth(
    api: Api, path: str, fields: dict[str, Any], misspelt: str, meant: str
) -> None:
    body = fields if path == RESPONSES else {"messages": [QUESTION], **fields}
    error = check_error(await api.http.post(path, json=body), 400)
    assert (error["param"], error["message"]) == (misspelt, f"unknown field: {misspelt}; did you mean {meant}?")


async def test_only_fields_of_the_same_kind_of_object_are_offered(api: Api) -> None:
    """A text block has no `input`; a call has."""
    for block, hint in (
        ({"type": "text", "text": "x", "inputt": {}}, ""),
        (
            {"type": "tool_use", "id": "1", "name": "f", "inputt": {}},
            "; did you mean messages[0].content[0].input?",
        ),
    ):
        body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": [block]}]}
        answer = await api.http.post(MESSAGES, json=body)
        assert answer.json()["error"]["message"] == f"unknown field: messages[0].content[0].inputt{hint}"
