"""The styles in which models call tools: how each is told from a chat template, read, and forced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.structured import Form, FormKind, Thinking
from router.api.tools.fields import NO_PARAMETERS, Function
from router.api.tools.machine import ToolParser
from router.api.tools.parsers import Hermes, Llama3, Mistral, Pythonic
from router.api.written_json import guidance

Literal = Callable[[str], str]
"""Writes a marker in Lark: as the special token that it is in this vocabulary, else as its characters."""


@dataclass(frozen=True, slots=True)
class Style:
    """One way to call tools."""

    parser: type[ToolParser]
    template: str
    """A regular expression that finds the style in a chat template."""
    markers: tuple[str, ...]
    """Special tokens that are part of a call, so they have to be seen."""
    frame: tuple[str, str, str]
    """The texts before all calls, between two, and behind all."""
    call: Callable[[Sequence[Function], Literal], list[str]]
    """Lark rules of one call, the first of which is `call`."""
    id_length: int = 0
    """The number of letters and digits of a call's id; 0 for OpenAI's form."""


def _schema(function: Function) -> dict[str, Any]:
    schema = NO_PARAMETERS if function.parameters is None else function.parameters
    return {**schema, "x-guidance": guidance(lenient=not function.strict)}


def _json_call(before: str, key: str, behind: str) -> Callable[[Sequence[Function], Literal], list[str]]:
    """A call as a JSON object between two texts."""

    def rules(functions: Sequence[Function], literal: Literal) -> list[str]:
        bodies = [f"body{at}" for at in range(len(functions))]
        head = f"{literal(before)} " if before else ""
        tail = f" {literal(behind)}" if behind else ""
        lines = [f"call: {head}({' | '.join(bodies)}){tail}"]
        for at, function in enumerate(functions):
            opening = f'{{"name": {json.dumps(function.name)}, "{key}": '
            lines.append(f"body{at}: {json.dumps(opening)} arguments{at} {json.dumps('}')}")
            lines.append(f"arguments{at}: %json {json.dumps(_schema(function))}")
        return lines

    return rules


def _python_call(functions: Sequence[Function], literal: Literal) -> list[str]:
    """A call in Python: required arguments first, then any others, in the order of the schema."""
    lines = [f"call: {' | '.join(f'call{at}' for at in range(len(functions)))}"]
    for at, function in enumerate(functions):
        schema = _schema(function)
        properties: dict[str, Any] = schema.get("properties") or {}
        required = [name for name in properties if name in (schema.get("required") or ())]
        names = [*required, *(name for name in properties if name not in required)]
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        opening, first = json.dumps(f"{function.name}("), " | ".join(_firsts(at, len(names), len(required)))
        lines.append(f'call{at}: {opening} {f"({first})" if first else ""}{"" if required else "?" * bool(first)} ")"')
        for place, name in enumerate(names):
            rest = " | ".join(_firsts(at, len(names), len(required), place + 1))
            more = f' (", " ({rest})){"" if place + 1 < len(required) else "?"}' if rest else ""
            lines.append(f"from{at}x{place}: {json.dumps(name + '=')} value{at}x{place}{more}")
            value = properties[name] if isinstance(properties[name], dict) else {}
            value = {**value, **shared, "x-guidance": schema["x-guidance"]}
            lines.append(f"value{at}x{place}: %json {json.dumps(value)}")
    return lines


def _firsts(at: int, names: int, required: int, start: int = 0) -> list[str]:
    """The rules that may go on from argument `start`: the next one, and if it is optional any after it."""
    last = start + 1 if start < required else names
    return [f"from{at}x{place}" for place in range(start, last)]


STYLES: dict[str, Style] = {
    "pythonic": Style(Pythonic, r"func_name1\(", (), ("[", ", ", "]"), _python_call),
    "mistral": Style(
        Mistral,
        r"\[TOOL_CALLS\]",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]", ", ", "]"),
        _json_call("", "arguments", ""),
        id_length=9,
    ),
    "hermes": Style(
        Hermes,
        r"<tool_call>",
        ("<tool_call>", "</tool_call>"),
        ("", "\n", ""),
        _json_call("<tool_call>", "arguments", "</tool_call>"),
    ),
    "llama3": Style(
        Llama3,
        r"python_tag|\"parameters\": dictionary",
        ("<|python_tag|>",),
        ("", "; ", ""),
        _json_call("", "parameters", ""),
    ),
}
"""By name, as the setting `tool_style` has it; the first whose `template` is found is the model's."""


def detect(template: str) -> str | None:
    """The style that a chat template asks its model for. None if it knows no tools, or only in a way that we do not."""
    return next((name for name, style in STYLES.items() if re.search(style.template, template)), None)


def force(style: Style, functions: Sequence[Function], most: int, literal: Literal, thinking: Thinking) -> Form:
    """The form of an answer that consists of one to `most` calls of `functions`."""
    before, between, behind = style.frame
    start = [f"start: {_framed(before, literal)}call"]
    if most > 1:
        start.append(f"({json.dumps(between)} call){{0,{most - 1}}}")
    if behind:
        start.append(json.dumps(behind))
    text = "\n".join([" ".join(start), *style.call(functions, literal)])
    return Form(FormKind.LARK, text, "tools", thinking=thinking)


def _framed(before: str, literal: Literal) -> str:
    if not before:
        return ""
    return f'{literal(before)} "[" ' if before == "[TOOL_CALLS]" else f"{json.dumps(before)} "
