"""Fields of a request that say what form its output must have: OpenAI's `response_format` and vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from hackkv.errors import RequestError
from hackkv.types import MAX_GRAMMAR_CHARS
from router.api.fields import OBJECT, TEXT, text_or
from router.api.strict import Strict

MAX_CHOICES = 1024

Schema = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
    text_or(OBJECT, dict, told="must be a JSON schema, as an object or as a text"),
]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_CHOICES, strict=False)]


class FormKind(StrEnum):
    """The meaning of the text of a `Form`."""

    JSON = "json"
    """A JSON schema."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    """Lark, or GBNF as llama.cpp has it."""
    LARK = "lark"
    """Lark that this program wrote."""


class Thinking(StrEnum):
    """Whether a model's output begins with its thoughts, which no form binds."""

    NEVER = "never"
    MAYBE = "maybe"
    """It may open with <think>."""
    OPEN = "open"
    """The prompt ends behind <think>."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form that an output must match."""

    kind: FormKind
    text: str
    param: str
    """The field that asked for it, for errors."""
    lenient: bool = False
    """Whether keywords of JSON Schema that cannot be enforced are ignored."""
    thinking: Thinking = Thinking.NEVER


class JsonSchema(Strict):
    """`response_format.json_schema`."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's newer form of the `guided_` fields."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Structured(Strict):
    """The fields themselves, a base of requests."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None

    def form(self) -> Form | None:
        """The form that the output must match, if any. Raises `RequestError` if two fields ask."""
        forms = [*self._response_forms(), *self._guided_forms()]
        if len(forms) > 1:
            raise RequestError(f"{forms[0].param} and {forms[1].param} exclude each other", forms[1].param)
        return forms[0] if forms else None

    def _response_forms(self) -> list[Form]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [_json({"type": "object"}, "response_format")]
        if asked.json_schema is None:
            raise RequestError("response_format.json_schema is required", "response_format.json_schema")
        # As with OpenAI, only `strict: true` promises that every keyword holds.
        lenient = not asked.json_schema.strict
        return [_json(asked.json_schema.json_schema, "response_format.json_schema.schema", lenient)]

    def _guided_forms(self) -> list[Form]:
        old = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        forms = _guided("guided_", *old)
        if (new := self.structured_outputs) is not None:
            forms += _guided("structured_outputs.", new.json_, new.regex, new.choice, new.grammar)
            if new.json_object:
                forms.append(_json({"type": "object"}, "structured_outputs.json_object"))
        return forms


def _guided(
    prefix: str, schema: Schema | None, regex: str | None, choice: tuple[str, ...] | None, grammar: str | None
) -> list[Form]:
    forms = []
    if schema is not None:
        forms.append(_json(schema, f"{prefix}json"))
    if regex is not None:
        forms.append(Form(FormKind.REGEX, regex, f"{prefix}regex"))
    if choice is not None:
        forms.append(Form(FormKind.CHOICE, json.dumps(choice), f"{prefix}choice"))
    if grammar is not None:
        forms.append(Form(FormKind.GRAMMAR, grammar, f"{prefix}grammar"))
    return forms


def _json(schema: Schema, param: str, lenient: bool = False) -> Form:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Form(FormKind.JSON, text, param, lenient)
