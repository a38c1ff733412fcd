"""Kinds of fields of a request.

A field that is *supported* is declared as pydantic has it. The annotations here are for the others. Each validates,
describes itself in `/openapi.json` and gives docs/api.md its row:

- `Ignored`: a hint without effect on the answer. Any value is accepted and dropped.
- `Refused`: asks for what this server does not do. Only values that ask for nothing are accepted.

A strict router (`strict: true`) accepts neither of them with another value than null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

STRICT: Final = {"strict": True}
"""Validation context of a strict router."""
FAULT: Final = "fault"
"""Type of the errors that `fault` raises."""

TEXT, PARTS, REFUSAL, OBJECT, ALLOWED = "<text>", "<parts>", "<refusal>", "<object>", "<allowed>"
"""Names of the kinds of a value, where a field may have several. An error's place has them between its steps."""


def fault(message: str, *where: str | int) -> NoReturn:
    """Refuse a value: `where` is the path from the validated value to the part at fault."""
    raise PydanticCustomError(FAULT, "{message}", {"message": message, "where": where})


def is_tag(name: str | int) -> bool:
    """Whether a step of an error's place names a kind of value, and no field: all such names are in angles."""
    return isinstance(name, str) and name.startswith("<") and name.endswith(">")


def of_kind(*kinds: str, told: str) -> BeforeValidator:
    """For a field `type`: only these kinds. `told` says which kinds there are, if a client names another."""

    def check(kind: object) -> object:
        if isinstance(kind, str) and kind not in kinds:
            fault(f"{told}, and no {kind[:40]!r}")
        return kind

    return BeforeValidator(check)


MAX_PARTS: Final = 1 << 12
PartT = TypeVar("PartT")
Text = Annotated[str, Tag(TEXT)]
Parts = Annotated[tuple[PartT, ...], Field(max_length=MAX_PARTS, fail_fast=True), Tag(PARTS)]


def text_or(tag: str, *types: type, told: str) -> Discriminator:
    """For a field that is a text (tagged `TEXT`) or of other `types` (tagged `tag`); else the error is `told`."""

    def kind(value: object) -> str | None:
        return TEXT if isinstance(value, str) else tag if isinstance(value, types) else None

    return Discriminator(kind, custom_error_type=FAULT, custom_error_message=told)


def text_or_parts(told: str) -> Discriminator:
    """For a field that is `Text` or `Parts`; else the error is `told`."""
    return text_or(PARTS, list, tuple, told=told)


class _Unsupported:
    """The base of `Ignored` and `Refused`: any JSON goes in, None comes out."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._checked)

    def _checked(self, value: object, info: ValidationInfo) -> None:
        if value is None:
            return
        self.check(value)
        if info.context == STRICT:
            fault("has no effect here, and this router is strict; leave it out")

    def check(self, value: object) -> None:
        """Raise if the value cannot be accepted."""


@dataclass(frozen=True)
class Ignored(_Unsupported):
    """A hint without effect here. `why` gives the reason."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"description": f"Ignored: {self.why}."}


@dataclass(frozen=True)
class Refused(_Unsupported):
    """Something that is not supported, the `neutral` values that do not ask for it, and what to do instead."""

    advice: str
    neutral: tuple[object, ...] = ()

    def check(self, value: object) -> None:
        """See `_Unsupported`."""
        if not any(_same(value, neutral) for neutral in self.neutral):
            fault(f"{self.advice}; leave it out")

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        accepted = {"enum": [None, *self.neutral]} if self.neutral else {"type": "null"}
        return {**accepted, "description": f"Not supported: {self.advice}."}

    def accepted(self) -> list[str]:
        """The neutral values as JSON."""
        return [json.dumps(value) for value in self.neutral]


@dataclass(frozen=True)
class NullIs:
    """A field whose null means its default, which is what OpenAI's clients send for a field they leave alone."""

    default: Any

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: self.default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


class Whole:
    """A field of whole numbers. JSON does not tell 5.0 from 5."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(whole, handler(source))


def whole(value: object) -> object:
    """A float without a fraction as an integer; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _same(value: object, neutral: object) -> bool:
    """JSON's equality: 0 and 0.0 are one number, and neither is false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
