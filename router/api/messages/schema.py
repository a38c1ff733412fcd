"""Requests of /v1/messages, as pydantic models. Every field of Anthropic's API is known here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hackkv.errors import RequestError
from router.api.conversation import Conversations
from router.api.fields import Ignored, Parts, Refused, Text, Whole, fault, of_kind, text_or_parts
from router.api.retold import ChatTurns, Retold
from router.api.schema import MAX_MESSAGES, MAX_STOPS, ChatRequest, StopString
from router.api.strict import Strict
from router.api.structured import JsonSchema, ResponseFormat
from router.api.texts import Question
from router.api.tokenize import Bounds, chat
from router.api.tools.fields import MAX_TOOLS, Function, FunctionName, Name, Tool, ToolChoice

_SHARED: Final = "KV of common prefixes is kept without it"
_UNSEEN: Final = "earlier thoughts are not shown to the model"
_ALONE: Final = "the model itself is the only caller"
_BLOCK: Final = of_kind("text", told="this model takes text only, as text, tool_use and tool_result")
_TOOL: Final = of_kind("custom", told="tools are functions that the client runs (custom)")


class TextBlock(Strict):
    """A text."""

    type: Annotated[Literal["text"], _BLOCK]
    text: str
    cache_control: Annotated[Any, Ignored(_SHARED)] = None
    citations: Annotated[Any, Ignored("chat templates have no place for them")] = None
    parsed_output: Annotated[Any, Ignored("the text says the same")] = None


Texts = Annotated[Text | Parts[TextBlock], text_or_parts("must be a text or a list of text blocks")]


class CallBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Annotated[Any, Ignored(_SHARED)] = None
    caller: Annotated[Any, Ignored(_ALONE)] = None
    toolset_name: Annotated[Any, Refused("there are no toolsets")] = None


class ResultBlock(Strict):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: Annotated[Any, Ignored("chat templates have no place for it; the content says what went wrong")] = None
    cache_control: Annotated[Any, Ignored(_SHARED)] = None
    toolset_name: Annotated[Any, Refused("there are no toolsets")] = None


class ThoughtBlock(Strict):
    """Earlier thoughts, which are not shown to the model."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Annotated[Any, Ignored(_UNSEEN)] = None
    signature: Annotated[Any, Ignored(_UNSEEN)] = None
    data: Annotated[Any, Ignored(_UNSEEN)] = None


_BLOCK_TAGS: Final = {
    "tool_use": "<call>", "tool_result": "<result>", "thinking": "<thought>", "redacted_thinking": "<thought>",
}  # fmt: skip


def _block_kind(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _BLOCK_TAGS.get(kind, "<text>") if isinstance(kind, str) else "<text>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[CallBlock, Tag("<call>")]
    | Annotated[ResultBlock, Tag("<result>")]
    | Annotated[ThoughtBlock, Tag("<thought>")],
    Discriminator(_block_kind),
]
Content = Annotated[Text | Parts[Block], text_or_parts("must be a text or a list of blocks")]


class Turn(Strict):
    """A message. Several of one role in a row are one."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_belong_to_roles(self) -> Turn:
        for index, block in enumerate(self.content if not isinstance(self.content, str) else ()):
            if isinstance(block, CallBlock) and self.role != "assistant":
                fault("tool_use belongs to assistants' messages", "content", index)
            if isinstance(block, ResultBlock) and self.role != "user":
                fault("tool_result belongs to users' messages", "content", index)
        return self


class CustomTool(Strict):
    """A function that the model may call and the client runs."""

    type: Annotated[Literal["custom"] | None, _TOOL] = None
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: Annotated[Any, Ignored(_SHARED)] = None
    input_examples: Annotated[Any, Ignored("chat templates have no place for them")] = None
    eager_input_streaming: Annotated[Any, Ignored("arguments always come as they are written")] = None
    defer_loading: Annotated[Any, Refused("the model is told of every tool", (False,))] = None
    allowed_callers: Annotated[Any, Refused(_ALONE, (["direct"], []))] = None

    def told(self) -> Tool:
        """The tool as the chat route has it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class Choice(Strict):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool, with `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            fault("belongs to type tool, and is required there", "name")
        return self

    def told(self, has_tools: bool) -> str | ToolChoice | None:
        """The choice as the chat route has it."""
        if self.type == "tool":
            return ToolChoice(type="function", function=FunctionName(name=self.name or ""))
        if self.type == "auto":
            return "auto" if has_tools else None
        return "required" if self.type == "any" else "none"


class OutputFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: Annotated[Any, Ignored("the model does not think by degrees")] = None


class Conversation(Strict):
    """What a prompt is made of: the fields that counting tokens has too."""

    messages: tuple[Turn, ...] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Texts | None = None
    tools: Annotated[tuple[CustomTool, ...], Field(max_length=MAX_TOOLS, strict=False)] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[Any, Ignored(_SHARED)] = None
    thinking: Annotated[
        Any, Ignored("a model thinks as it was trained to; where it marks thoughts they come as blocks")
    ] = None
    speed: Annotated[Any, Ignored("there is one tier")] = None
    user_profile_id: Annotated[Any, Ignored("users are not told apart")] = None
    workspace_id: Annotated[Any, Ignored("there are no workspaces")] = None
    context_management: Annotated[Any, Refused("prompts are not cut: send a shorter one", ({},))] = None
    mcp_servers: Annotated[Any, Refused("the client calls tools, and no server", ([],))] = None

    @model_validator(mode="after")
    def _calls_come_before_their_results(self) -> Conversation:
        last = self.messages[-1]
        if not isinstance(last.content, str) and any(isinstance(block, CallBlock) for block in last.content):
            fault("ends with calls that have no results yet", "messages")
        return self

    def told(self) -> dict[str, Any]:
        """Fields of the `ChatRequest` that says the same."""
        turns = self._turns().messages()
        continues = turns[-1].role == "assistant" and bool(turns[-1].text)
        tools = tuple(tool.told() for tool in self.tools or ()) or None
        choice = self.tool_choice
        return {
            "messages": turns,
            "continue_final_message": continues,
            "tools": tools,
            "tool_choice": choice.told(tools is not None) if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        }

    def _turns(self) -> ChatTurns:
        turns = ChatTurns(merging=True)
        if self.system is not None:
            turns.say("system", _text(self.system))
        for message in self.messages:
            if isinstance(message.content, str):
                turns.say(message.role, message.content)
            else:
                _tell(turns, message.role, message.content)
        return turns


class MessagesRequest(Conversation, Retold):
    """POST /v1/messages."""

    names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema.schema": "output_config.format.schema", "response_format": "output_config.format",
    }  # fmt: skip

    max_tokens: Annotated[int, Field(ge=1, le=1 << 30), Whole()]
    stop_sequences: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOPS, strict=False)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: Annotated[Any, Ignored("requests are not kept")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    inference_geo: Annotated[Any, Ignored("there is one place")] = None
    diagnostics: Annotated[Any, Ignored("requests are not kept")] = None
    container: Annotated[Any, Refused("the server runs no code")] = None

    def stand_in(self, *, repeated: bool) -> dict[str, Any]:
        """One empty message."""
        return {"messages": [{"role": "user", "content": ""}], "system": None}

    def chat(self) -> ChatRequest:
        """See `Retold`."""
        form = self.output_config.format if self.output_config else None
        schema = JsonSchema.model_validate({"name": "answer", "schema": form.json_schema}) if form else None
        return ChatRequest.model_validate(
            {
                **self.sampled(),
                **self.told(),
                "max_tokens": self.max_tokens,
                "stop": list(self.stop_sequences or ()),
                "response_format": ResponseFormat(type="json_schema", json_schema=schema) if schema else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )


class CountRequest(Conversation, Question):
    """POST /v1/messages/count_tokens."""

    def answer(self, conversations: Conversations, bounds: Bounds) -> dict[str, Any]:
        """The number of tokens of the prompt."""
        (ids,) = chat(conversations, ChatRequest.model_validate(self.told()), bounds)
        return {"input_tokens": len(ids)}


def _tell(turns: ChatTurns, role: str, blocks: Iterable[Block]) -> None:
    """A message in blocks, in their order."""
    for block in blocks:
        if isinstance(block, TextBlock):
            turns.say(role, block.text)
        elif isinstance(block, CallBlock):
            turns.call(block.id, block.name, _json(block.input))
        elif isinstance(block, ResultBlock):
            turns.say("tool", _text(block.content), tool_call_id=block.tool_use_id)


def _json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except ValueError as error:  # a number of more than 4300 digits
        raise RequestError(f"messages: the input of a call cannot be written: {error}", "messages") from error


def _text(content: str | tuple[TextBlock, ...]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
