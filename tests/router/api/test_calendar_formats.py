"""Dates and times that a schema's grammar lets through are those of the calendar, wherever the schema has them."""

from __future__ import annotations

import json
from calendar import monthrange
from collections.abc import Callable
from datetime import date, datetime, time
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hackkv.packaged import SHIPPED
from router.api.calendar_formats import PATTERNS, with_patterns
from router.api.grammar_child import make_grammar
from router.api.structured import Thinking
from router.api.tools.fields import Function
from router.api.tools.styles import STYLES, force

Schema = dict[str, Any]
DATE: Schema = {"type": "string", "format": "date"}
BOUND: Schema = {**DATE, "pattern": PATTERNS["date"]}
LEAP_DAY, NO_DAY = "2024-02-29", "2023-02-29"


@cache
def tokenizer() -> LLTokenizer:
    """The tokenizer of the model in the repository."""
    return LLTokenizer(str(SHIPPED / "tokenizer.json"))


def told(grammar: str) -> Callable[[str], bool]:
    """Says whether a whole text matches a grammar."""
    matcher = LLMatcher(tokenizer(), grammar)
    assert not matcher.is_error(), matcher.get_error()

    def matches(text: str) -> bool:
        tokens = [*tokenizer().tokenize_str(text), tokenizer().eos_token]
        return matcher.validate_tokens(tokens) == len(tokens)

    return matches


def lets_through(schema: Schema, lenient: bool = False) -> Callable[[Any], bool]:
    """Says whether a JSON value matches a schema by the grammar that clients get."""
    matches = told(make_grammar("json", json.dumps(schema), lenient, Thinking.NEVER))
    return lambda value: matches(json.dumps(value))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "behind"), [("date", ""), ("date-time", "T12:00:00Z")])
def test_every_day_of_two_centuries_is_a_date_and_no_other_is(form: str, behind: str) -> None:
    matches, right = lets_through({"type": "string", "format": form}), 0
    for year in range(1900, 2101):
        for month in range(14):
            last = monthrange(year, month)[1] if 1 <= month <= 12 else 0
            right += last
            for day in (0, 1, 9, 10, 19, 20, *range(28, 33)) if last else (1, 28):
                assert matches(f"{year}-{month:02}-{day:02}{behind}") is (1 <= day <= last), (year, month, day)
            assert all(matches(f"{date(year, month, day)}{behind}") for day in range(1, last + 1))
    assert right == (date(2101, 1, 1) - date(1900, 1, 1)).days


@pytest.mark.parametrize("year", [0, 1, 4, 9, 10, 99, 100, 400, 999, 1000, 1582, 2400, 9996, 9999])
def test_the_calendar_goes_from_year_1_to_9999(year: int) -> None:
    matches = lets_through(DATE)
    assert matches(f"{year:04}-12-31") is (year > 0)
    assert matches(f"{year:04}-02-29") is (year > 0 and monthrange(year, 2)[1] == 29)


@pytest.mark.parametrize(
    ("form", "before"), [("time", ""), ("date-time", f"{LEAP_DAY}T"), ("date-time", f"{LEAP_DAY}t")]
)
def test_times_of_a_day_are_times_and_no_others_are(form: str, before: str) -> None:
    matches = lets_through({"type": "string", "format": form})
    for hour in range(26):
        for minute in (0, 9, 10, 59, 60):
            for second in (0, 9, 10, 30, 59, 60, 61):
                clock = f"{hour:02}:{minute:02}:{second:02}"
                right = hour < 24 and minute < 60 and second < 60
                assert matches(f"{before}{clock}Z") is right, clock
                assert matches(f"{before}{clock}.25+05:30") is right, clock
    assert all(matches(f"{before}{time(at // 3600, at // 60 % 60, at % 60)}Z") for at in range(0, 86_400, 7))


@pytest.mark.parametrize("text", ["2024-02-29T12:30:00.123456z", "2024-02-29T12:30:00-23:59"])
def test_fractions_and_zones_are_let_through(text: str) -> None:
    assert datetime.fromisoformat(text.upper())
    assert lets_through({"type": "string", "format": "date-time"})(text)
    assert lets_through({"type": "string", "format": "time"})(text.partition("T")[2])


@pytest.mark.parametrize("text", ["12:30:00", "12:30:00+24:00", "12:30:00+00:60", "12:30:00.Z", "12:30Z", "1:30:00Z"])
def test_what_is_no_fraction_and_no_zone_is_not(text: str) -> None:
    assert not lets_through({"type": "string", "format": "time"})(text)
    assert not lets_through({"type": "string", "format": "date-time"})(f"{LEAP_DAY}T{text}")


PLACES: list[tuple[Schema, Callable[[str], Any]]] = [
    (DATE, lambda day: day),
    ({"format": "date"}, lambda day: day),
    ({"type": ["string", "null"], "format": "date"}, lambda day: day),
    ({**DATE, "pattern": "^202"}, lambda day: day),
    ({**DATE, "pattern": "^202", "allOf": [{"minLength": 10}]}, lambda day: day),
    ({"type": "object", "properties": {"format": DATE}}, lambda day: {"format": day}),
    ({"type": "object", "patternProperties": {"^x": DATE}}, lambda day: {"x1": day}),
    ({"type": "object", "additionalProperties": DATE}, lambda day: {"any": day}),
    ({"type": "array", "items": DATE}, lambda day: [LEAP_DAY, day]),
    ({"type": "array", "prefixItems": [DATE, {"type": "null"}]}, lambda day: [day, None]),
    ({"type": "array", "items": {"type": "array", "items": DATE}}, lambda day: [[], [day]]),
    ({"anyOf": [{"type": "integer"}, DATE]}, lambda day: day),
    ({"allOf": [{"type": "string"}, DATE]}, lambda day: day),
    ({"oneOf": [{"type": "integer"}, DATE]}, lambda day: day),
    ({"$ref": "#/$defs/day", "$defs": {"day": DATE}}, lambda day: day),
    ({"$ref": "#/definitions/day", "definitions": {"day": DATE}}, lambda day: day),
    ({"$ref": "#/parts/a~1b%20c/0", "parts": {"a/b c": [DATE]}}, lambda day: day),
    ({"type": "object", "properties": {"next": {"$ref": "#"}, "on": DATE}}, lambda day: {"next": {"on": day}}),
]


@pytest.mark.parametrize(("schema", "value"), PLACES)
def test_dates_are_held_to_the_calendar_wherever_a_schema_has_them(schema: Schema, value: Callable[[str], Any]) -> None:
    matches = lets_through(schema, lenient=True)
    assert matches(value(LEAP_DAY))
    assert not matches(value(NO_DAY))


SAID = {"format": "date", "type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": SAID},
        {"enum": [SAID, [SAID]]},
        {"type": "object", "default": SAID, "examples": [SAID]},
        {"type": "object", "properties": {"format": {"const": "date"}, "type": {"const": "string"}}},
        {"allOf": [{"const": SAID}], "$defs": {"again": {"$ref": "#/allOf/0/const"}}},
        {"$ref": "#/nowhere/7", "items": [{"$ref": "#/items/9"}, {"$ref": "other.json"}, {"$ref": "#/items/x"}]},
        {"not": DATE, "if": DATE},
        {"format": "date-of-birth"},
        {"format": ["date"]},
        {"$ref": 1, "properties": None, "items": 7, "anyOf": {"format": "date"}},
    ],
)
def test_what_is_no_schema_of_a_date_stays_as_it_is(schema: Schema) -> None:
    assert with_patterns(schema) == schema


def test_a_value_that_looks_like_a_schema_can_be_said() -> None:
    matches = lets_through({"enum": [SAID]})
    assert matches(SAID)
    assert not matches({**SAID, "pattern": PATTERNS["date"]})


def test_a_schema_is_copied_and_bound_once() -> None:
    schema = {"type": "array", "items": DATE, "contains": {"$ref": "#/items"}}
    assert with_patterns(schema) == {**schema, "items": BOUND}
    assert schema["items"] == {"type": "string", "format": "date"}


def test_schemas_may_be_deep() -> None:
    schema = DATE
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    bound = with_patterns(schema)
    for _ in range(300):
        bound = bound["items"]
    assert bound == BOUND


@pytest.mark.parametrize("name", sorted(STYLES))
def test_arguments_of_tools_have_dates_of_the_calendar(name: str) -> None:
    parameters = {"type": "object", "properties": {"day": {"$ref": "#/$defs/day"}}, "$defs": {"day": DATE}}
    function = Function(name="book", parameters={**parameters, "required": ["day"], "additionalProperties": False})
    form = force(STYLES[name], (function,), 1, json.dumps, Thinking.NEVER)
    matches = told(make_grammar(form.kind, form.text, form.lenient, form.thinking))
    calls = {
        "hermes": '<tool_call>{"name": "book", "arguments": {"day": "%s"}}</tool_call>',
        "llama3": '{"name": "book", "parameters": {"day": "%s"}}',
        "mistral": '[TOOL_CALLS][{"name": "book", "arguments": {"day": "%s"}}]',
        "pythonic": '[book(day="%s")]',
    }
    assert matches(calls[name] % LEAP_DAY)
    assert not matches(calls[name] % NO_DAY)
