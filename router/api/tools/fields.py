"""Fields of a chat request that are about tools, as OpenAI has them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from hackkv.errors import RequestError
from router.api.fields import ALLOWED, FAULT, OBJECT, TEXT, Ignored, fault
from router.api.strict import Strict

MAX_TOOLS = 128
MAX_CALLS = 16
"""The most calls of a forced answer."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def read_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments as an object. A client may send back whatever a model wrote. Arguments that `max_tokens` cut
    off are read as far as they go. A text in braces that is no JSON stays a text.

    Raises `ValueError`, which says what is wrong.
    """
    try:
        found = _read(text or "{}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and text.startswith("{") and text.endswith("}"):
            return text
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # after a complete value
            raise
        try:
            found: object = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            raise error from None
        json.dumps(found)  # which refuses numbers that are too long for a template to write
        return found


def json_object(value: object) -> object:
    """Refuse a text that `read_arguments` refuses; everything else is left to the next validator."""
    if isinstance(value, str):
        try:
            read_arguments(value)
        except ValueError as error:
            fault(str(error))
    return value


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool: only functions are known."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The function of a `ToolChoice`."""

    name: str


class ToolChoice(Strict):
    """A function of the tools: one that has to be called, or one of those that may be."""

    type: Literal["function"]
    function: FunctionName


AllowedMode = Literal["auto", "required"]


class AllowedTools(Strict):
    """The `allowed_tools` of an `AllowedChoice`."""

    mode: AllowedMode
    tools: Annotated[tuple[ToolChoice, ...], Field(min_length=1, max_length=MAX_TOOLS, strict=False)]


class AllowedChoice(Strict):
    """Some of the tools: the model is told of no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return TEXT
    if not isinstance(value, dict | Strict):
        return None
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ALLOWED if kind == "allowed_tools" else OBJECT


CHOICE_KIND: Final = Discriminator(
    _choice_kind, custom_error_type=FAULT, custom_error_message="must be a word, a function or allowed tools"
)
"""Tells `Mode`, a function (tagged `OBJECT`) and some of the tools (tagged `ALLOWED`) apart."""
Mode = Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
Choice = Annotated[
    Mode | Annotated[ToolChoice, Tag(OBJECT)] | Annotated[AllowedChoice, Tag(ALLOWED)],
    CHOICE_KIND,
]


class CalledFunction(Strict):
    """What was called."""

    name: str
    arguments: str
    """A JSON object, or as much of it as the model wrote."""
    parsed_arguments: Annotated[Any, Ignored("the arguments say the same")] = None


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Sent back by clients that put it together from a stream; has no effect."""

    def rendered(self, param: str) -> dict[str, Any]:
        """The call as chat templates want it, its arguments as `read_arguments` has them. Raises `RequestError` naming
        the field in `param`."""
        at = f"{param}.function.arguments"
        try:
            arguments = read_arguments(self.function.arguments)
        except ValueError as error:
            raise RequestError(f"{at} {error}", at) from error
        return {
            "id": self.id or "",
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ToolFields(Strict):
    """The fields themselves, a base of chat requests."""

    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, strict=False)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None

    def offered(self) -> tuple[Function, ...]:
        """The functions that the model is told of. Raises `RequestError` if `tool_choice` has nothing to choose."""
        functions = tuple(tool.function for tool in self.tools or ())
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise RequestError("tools: two functions have one name", "tools")
        for name in self._chosen():
            if name not in names:
                raise RequestError(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
        if self.tool_choice in ("auto", "required") and not functions:
            raise RequestError(f"tool_choice: {self.tool_choice!r} needs tools", "tool_choice")
        if isinstance(self.tool_choice, AllowedChoice):
            return tuple(function for function in functions if function.name in self._chosen())
        return () if self.tool_choice == "none" else functions

    def forced(self) -> tuple[Function, ...]:
        """The functions of which one has to be called; empty if none has to be."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return tuple(function for function in self.offered() if function.name in self._chosen())
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        return self.offered() if mode == "required" else ()

    def _chosen(self) -> list[str]:
        """Names that `tool_choice` holds."""
        if isinstance(self.tool_choice, ToolChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return []

    @property
    def calls_at_once(self) -> int:
        """The most calls that a forced answer may hold."""
        single = isinstance(self.tool_choice, ToolChoice) or self.parallel_tool_calls is False
        return 1 if single else MAX_CALLS
