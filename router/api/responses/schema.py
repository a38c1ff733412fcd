"""Requests of /v1/responses, as pydantic models. Every field of OpenAI's is known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, model_validator

from router.api.fields import (
    ALLOWED,
    OBJECT,
    STRICT,
    Ignored,
    Parts,
    Refused,
    Text,
    Whole,
    fault,
    of_kind,
    text_or,
    text_or_parts,
)
from router.api.retold import ChatTurns, Retold
from router.api.schema import MAX_LOGPROBS, MAX_MESSAGES, ChatRequest, RefusalPart
from router.api.strict import Strict
from router.api.structured import JsonSchema, ResponseFormat
from router.api.tools.fields import (
    CHOICE_KIND,
    MAX_TOOLS,
    AllowedChoice,
    AllowedMode,
    AllowedTools,
    Function,
    FunctionName,
    Mode,
    Name,
    Tool,
    ToolChoice,
    json_object,
)

_KEPT: Final = "answers are not kept"
_ALL_ALIKE: Final = "requests are all treated alike"
_CACHED: Final = "common prefixes are found without it"
_PART: Final = of_kind("input_text", "output_text", told="this model takes text only")
_TOOL: Final = of_kind("function", told="tools are functions that the client calls")
LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"

INCLUDES: Final = {"type": ["array", "null"], "items": {"enum": [LOGPROBS, _ENCRYPTED]}}


def _parse_includes(value: object, info: ValidationInfo) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        fault("must be a list")
    for index, name in enumerate(value):
        if name == _ENCRYPTED and info.context == STRICT:
            fault("has no effect here, and this router is strict; leave it out", index)
        if name not in (LOGPROBS, _ENCRYPTED):
            fault(f"can only be {LOGPROBS!r}: there are no tools and files of the server's own", index)
    return tuple(value)


def _item_type(kind: object) -> object:
    if kind == "item_reference":
        fault(f"{_KEPT}: send the item itself")
    if isinstance(kind, str) and kind != "message":
        fault(f"items are message, function_call, function_call_output or reasoning, and not {kind[:40]!r}")
    return kind


class ItemPart(Strict):
    """A piece of an item's content."""

    type: Annotated[Literal["input_text", "output_text"], _PART]
    text: str
    annotations: Annotated[Any, Ignored("chat templates have no place for them")] = None
    logprobs: Annotated[Any, Ignored("the text says the same")] = None
    parsed: Annotated[Any, Ignored("the text says the same")] = None
    prompt_cache_breakpoint: Annotated[Any, Ignored(_CACHED)] = None


def _part_kind(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "<refusal>" if kind == "refusal" else "<part>"


Part = Annotated[
    Annotated[ItemPart, Tag("<part>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_kind)
]
Content = Annotated[Text | Parts[Part], text_or_parts("must be a text or a list of text parts")]


class MessageItem(Strict):
    """One turn of a conversation, by a client or as this server answered it."""

    type: Annotated[Literal["message"], BeforeValidator(_item_type)] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Annotated[Any, Ignored("chat templates have no place for it")] = None
    status: Annotated[Any, Ignored("chat templates have no place for it")] = None
    phase: Annotated[Any, Ignored("chat templates have no place for it")] = None


class CallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, BeforeValidator(json_object)]
    """A JSON object."""
    id: Annotated[Any, Ignored("call_id names the call")] = None
    status: Annotated[Any, Ignored("chat templates have no place for it")] = None
    namespace: Annotated[Any, Refused("functions have no namespaces")] = None
    caller: Annotated[Any, Ignored("the model itself is the only caller")] = None
    parsed_arguments: Annotated[Any, Ignored("the arguments say the same")] = None
    async_: Annotated[Any, Ignored("the client says when a call is over")] = None


class ResultItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Annotated[Any, Ignored("call_id names the call")] = None
    status: Annotated[Any, Ignored("chat templates have no place for it")] = None
    caller: Annotated[Any, Ignored("the model itself is the only caller")] = None


class ThoughtItem(Strict):
    """Earlier thoughts, which are not shown to the model."""

    type: Literal["reasoning"]
    id: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    summary: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    content: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    encrypted_content: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    status: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None


_ITEM_TAGS: Final = {"function_call": "<call>", "function_call_output": "<result>", "reasoning": "<thought>"}


def _item_kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _ITEM_TAGS.get(kind, "<message>") if isinstance(kind, str) else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[ResultItem, Tag("<result>")]
    | Annotated[ThoughtItem, Tag("<thought>")],
    Discriminator(_item_kind),
]
Input = Annotated[
    Text
    | Annotated[tuple[Item, ...], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True), Tag("<items>")],
    text_or("<items>", list, tuple, told="must be a text or a list of items"),
]


class FunctionTool(Strict):
    """A function that the model may call and the client runs."""

    type: Annotated[Literal["function"], _TOOL]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Annotated[Any, Ignored("the model is told of parameters only")] = None
    defer_loading: Annotated[Any, Refused("the model is told of every tool", (False,))] = None
    allowed_callers: Annotated[Any, Refused("the model itself is the only caller", (["direct"], []))] = None


class FunctionChoice(Strict):
    """A function of the tools: one that has to be called, or one of those that may be."""

    type: Annotated[Literal["function"], _TOOL]
    name: str

    def chat(self) -> ToolChoice:
        """The choice as the chat route has it."""
        return ToolChoice(type="function", function=FunctionName(name=self.name))


class AllowedFunctions(Strict):
    """Some of the tools: the model is told of no others."""

    type: Literal["allowed_tools"]
    mode: AllowedMode
    tools: Annotated[tuple[FunctionChoice, ...], Field(min_length=1, max_length=MAX_TOOLS, strict=False)]

    def chat(self) -> AllowedChoice:
        """The choice as the chat route has it."""
        tools = tuple(tool.chat() for tool in self.tools)
        return AllowedChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=self.mode, tools=tools))


Choice = Annotated[
    Mode | Annotated[FunctionChoice, Tag(OBJECT)] | Annotated[AllowedFunctions, Tag(ALLOWED)],
    CHOICE_KIND,
]


class TextFormat(Strict):
    """The form of the answer; with `json_schema` as `response_format.json_schema` has it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schemas_have_names(self) -> TextFormat:
        for field, value in (("name", self.name), ("schema", self.json_schema)):
            if self.type == "json_schema" and value is None:
                fault("is required", field)
        return self

    def response_format(self) -> ResponseFormat:
        """The format as the chat route has it."""
        schema = None
        if self.type == "json_schema":
            given = {"name": self.name, "description": self.description, "strict": self.strict}
            schema = JsonSchema.model_validate({**given, "schema": self.json_schema})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Strict):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Ignored("the model does not know degrees of it")] = None


class EventOptions(Strict):
    """`stream_options`."""

    include_obfuscation: Annotated[Any, Ignored("events are not padded")] = None


class ResponsesRequest(Retold):
    """POST /v1/responses."""

    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
    }

    input: Input
    instructions: str | None = None
    """A system's message before the input."""
    max_output_tokens: Annotated[int | None, Field(ge=1, le=1 << 30), Whole()] = None
    tools: Annotated[tuple[FunctionTool, ...], Field(max_length=MAX_TOOLS, strict=False)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), Whole()] = None
    include: Annotated[tuple[str, ...], BeforeValidator(_parse_includes), WithJsonSchema(INCLUDES)] = ()
    """`message.output_text.logprobs` is supported, `reasoning.encrypted_content` ignored, the rest refused."""
    stream_options: EventOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    previous_response_id: Annotated[Any, Refused(f"{_KEPT}: send the conversation so far as input")] = None
    conversation: Annotated[Any, Refused(f"{_KEPT}: send the conversation so far as input")] = None
    prompt: Annotated[Any, Refused("there are no stored prompts: send the text as instructions and input")] = None
    background: Annotated[Any, Refused(f"{_KEPT}: wait for this one, or stream it", (False,))] = None
    truncation: Annotated[Any, Refused("prompts are not cut: send a shorter one", ("disabled",))] = None
    context_management: Annotated[Any, Refused("prompts are not cut: send a shorter one", ([],))] = None
    moderation: Annotated[Any, Refused("answers are not moderated")] = None
    store: Annotated[Any, Ignored("requests are not kept")] = None
    background_options: Annotated[Any, Ignored("says how another field works that is not supported")] = None
    max_tool_calls: Annotated[Any, Ignored("it bounds calls of a server's own tools, and there are none")] = None
    reasoning: Annotated[Any, Ignored("the model does not think by degrees")] = None
    metadata: Annotated[Any, Ignored("requests are not kept")] = None
    user: Annotated[Any, Ignored("users are not told apart")] = None
    safety_identifier: Annotated[Any, Ignored("users are not told apart")] = None
    access_programs: Annotated[Any, Ignored(_ALL_ALIKE)] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    image: Annotated[Any, Ignored("there are no pictures")] = None
    prompt_cache_key: Annotated[Any, Ignored(_CACHED)] = None
    prompt_cache_options: Annotated[Any, Ignored(_CACHED)] = None
    prompt_cache_retention: Annotated[Any, Ignored("KV stays while there is room for it")] = None

    def stand_in(self, *, repeated: bool) -> dict[str, Any]:
        """No text, but for instructions, which the answer repeats."""
        return {"input": "", "instructions": self.instructions if repeated else None}

    @property
    def logprobs(self) -> bool:
        """Whether the answer's tokens are told with their log-probabilities."""
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def chat(self) -> ChatRequest:
        """See `Retold`."""
        tools = tuple(_tool(tool) for tool in self.tools or ())
        choice: ToolChoice | AllowedChoice | str | None
        if isinstance(self.tool_choice, FunctionChoice | AllowedFunctions):
            choice = self.tool_choice.chat()
        else:  # auto is the default here, and no wish for tools
            choice = None if self.tool_choice == "auto" and not tools else self.tool_choice
        form = self.text.format if self.text else None
        return ChatRequest.model_validate(
            {
                **self.sampled(),
                "messages": self._turns().messages(),
                "tools": tools or None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": form.response_format() if form else None,
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs if self.logprobs else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )

    def _turns(self) -> ChatTurns:
        turns = ChatTurns()
        if self.instructions is not None:
            turns.say("system", self.instructions)
        if isinstance(self.input, str):
            turns.say("user", self.input)
            return turns
        for item in self.input:
            if isinstance(item, MessageItem):
                turns.say(item.role, _text(item.content))
            elif isinstance(item, CallItem):
                turns.call(item.call_id, item.name, item.arguments)
            elif isinstance(item, ResultItem):
                turns.say("tool", _text(item.output), tool_call_id=item.call_id)
        return turns


def _text(content: str | tuple[ItemPart | RefusalPart, ...]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> Tool:
    function = tool.model_dump(include=set(Function.model_fields))
    return Tool(type="function", function=Function.model_validate(function))
