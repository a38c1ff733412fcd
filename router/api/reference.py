"""`python -m router.api.reference`: docs/api.md's tables of endpoints and fields, from the routes and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.api.app import document
from router.api.extras import ChatExtras, LlamaExtras, VllmExtras
from router.api.fields import Ignored, Refused
from router.api.messages import schema as anthropic
from router.api.responses.schema import (
    AllowedFunctions,
    CallItem,
    EventOptions,
    FunctionChoice,
    FunctionTool,
    ItemPart,
    MessageItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
    TextOptions,
    ThoughtItem,
)
from router.api.sampled import Sampled
from router.api.schema import ChatRequest, CompletionRequest, Generate, Message, RefusalPart, StreamOptions, TextPart
from router.api.structured import JsonSchema, ResponseFormat, StructuredOutputs
from router.api.texts import DetokenizeRequest, TokenizeRequest
from router.api.tools.fields import AllowedChoice, AllowedTools, CalledFunction, Function, Tool, ToolCall, ToolChoice

_HUGE: Final = 1 << 30
"""Bounds from here on only keep numbers within their types."""
_SECTIONS: Final[tuple[tuple[str, type[BaseModel], tuple[type[BaseModel], ...]], ...]] = (
    ("All routes that generate", Sampled, ()),
    ("`/v1/completions` and `/v1/chat/completions`", Generate, (Sampled,)),
    ("`/v1/completions` alone", CompletionRequest, (Generate,)),
    ("`/v1/chat/completions` alone", ChatRequest, (Generate,)),
    ("`stream_options`", StreamOptions, ()),
    ("A message of `messages`", Message, ()),
    ("A part of a message's `content`", TextPart, ()),
    ("A part with a model's refusal", RefusalPart, ()),
    ("`response_format`", ResponseFormat, ()),
    ("`response_format.json_schema`", JsonSchema, ()),
    ("`structured_outputs`", StructuredOutputs, ()),
    ("A tool of `tools`", Tool, ()),
    ("The `function` of a tool", Function, ()),
    ("`tool_choice` as an object", ToolChoice, ()),
    ("`tool_choice` as some of the tools", AllowedChoice, ()),
    ("`tool_choice.allowed_tools`", AllowedTools, ()),
    ("A call of a message's `tool_calls`", ToolCall, ()),
    ("The `function` of a call", CalledFunction, ()),
    ("`/v1/responses` alone", ResponsesRequest, (Sampled,)),
    ("`text` of `/v1/responses`", TextOptions, ()),
    ("`text.format`", TextFormat, ()),
    ("A tool of `tools` of `/v1/responses`", FunctionTool, ()),
    ("`tool_choice` of `/v1/responses` as an object", FunctionChoice, ()),
    ("`tool_choice` of `/v1/responses` as some of the tools", AllowedFunctions, ()),
    ("`stream_options` of `/v1/responses`", EventOptions, ()),
    ("A message of `input`", MessageItem, ()),
    ("A part of its `content`", ItemPart, ()),
    ("A `function_call` of `input`", CallItem, ()),
    ("A `function_call_output` of `input`", ResultItem, ()),
    ("A `reasoning` of `input`", ThoughtItem, ()),
    ("`/v1/messages` and `/v1/messages/count_tokens`", anthropic.Conversation, ()),
    ("`/v1/messages` alone", anthropic.MessagesRequest, (Sampled, anthropic.Conversation)),
    ("`output_config`", anthropic.OutputConfig, ()),
    ("`output_config.format`", anthropic.OutputFormat, ()),
    ("A tool of `tools` of `/v1/messages`", anthropic.CustomTool, ()),
    ("`tool_choice` of `/v1/messages`", anthropic.Choice, ()),
    ("A message of `messages` of `/v1/messages`", anthropic.Turn, ()),
    ("A `text` of its `content`", anthropic.TextBlock, ()),
    ("A `tool_use` of its `content`", anthropic.CallBlock, ()),
    ("A `tool_result` of its `content`", anthropic.ResultBlock, ()),
    ("A `thinking` of its `content`", anthropic.ThoughtBlock, ()),
    ("`/tokenize`", TokenizeRequest, ()),
    ("`/detokenize`", DetokenizeRequest, ()),
)


def reference() -> str:
    """All tables in Markdown."""
    return "\n\n".join((_endpoints(), *(_fields(title, model, bases) for title, model, bases in _SECTIONS)))


def _endpoints() -> str:
    lines = ["### Endpoints", "", "| endpoint | what it does | answers |", "|---|---|---|"]
    for path, operations in document(needs_key=False)["paths"].items():
        for method, operation in sorted(operations.items()):  # FastAPI keeps methods in a set
            what = " ".join(operation["description"].split())
            lines.append(f"| `{method.upper()} {path}` | {what} | {', '.join(operation['responses'])} |")
    return "\n".join(lines)


def _fields(title: str, model: type[BaseModel], bases: tuple[type[BaseModel], ...]) -> str:
    known = {name for base in bases for name in base.model_fields}
    schema = model.model_json_schema()["properties"]
    lines = [f"### {title}", "", "| field | | what |", "|---|---|---|"]
    rows = [(name, field) for name, field in model.model_fields.items() if name not in known]
    for name, field in sorted(rows, key=lambda row: _rank(*row)):
        kind = next((each for each in field.metadata if isinstance(each, Ignored | Refused)), None)
        if isinstance(kind, Ignored):
            treatment, what = "ignored", kind.why
        elif isinstance(kind, Refused):
            accepted = f"; accepted: {', '.join(f'`{value}`' for value in kind.accepted())}" if kind.neutral else ""
            treatment, what = "refused", kind.advice + accepted
        else:
            treatment, what = "supported", "; ".join(_described(schema[field.alias or name]))
        lines.append(f"| `{field.alias or name}`{_origin(name, field)} | {treatment} | {what} |")
    return "\n".join(lines)


def _rank(name: str, field: FieldInfo) -> int:
    """OpenAI's fields and ours first, then those of peers."""
    return next((rank for rank, (peer, _) in enumerate(_PEERS, 1) if _has(peer, name, field)), 0)


def _origin(name: str, field: FieldInfo) -> str:
    return next((f" ({label})" for peer, label in _PEERS if _has(peer, name, field)), "")


def _has(peer: type[BaseModel], name: str, field: FieldInfo) -> bool:
    """Whether this is the peer's field, and not another of the same name."""
    return name in peer.model_fields and peer.model_fields[name].metadata == field.metadata


_PEERS: Final[tuple[tuple[type[BaseModel], str], ...]] = (
    (VllmExtras, "vLLM"), (LlamaExtras, "llama.cpp"), (ChatExtras, "vLLM, llama.cpp"),
)  # fmt: skip


def _described(schema: dict[str, Any]) -> Iterator[str]:
    """Types with their bounds, the default, and what the field's docstring says."""
    types = [_type(each) for each in schema.get("anyOf", [schema])]
    yield " or ".join(dict.fromkeys(each for each in types if each != "null"))
    if schema.get("default") not in (None, [], ""):
        yield f"default `{str(schema['default']).lower()}`"
    if "description" in schema:
        yield " ".join(schema["description"].split())


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"a {schema['$ref'].rpartition('/')[2]}"
    if "oneOf" in schema:
        return " or ".join(map(_type, schema["oneOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        kind = next(each for each in kind if each != "null")
    name = {"array": "list", "integer": "whole number"}.get(kind, kind)
    if kind == "array":
        return f"{name} of {_type(schema['items'])}"
    words = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
    bounds = [words[key].format(f"{schema[key]:g}") for key in words if abs(schema.get(key, _HUGE)) < _HUGE]
    return " ".join([name, *bounds])


if __name__ == "__main__":
    print(reference())
