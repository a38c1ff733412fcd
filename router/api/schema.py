"""Requests of the HTTP API, as pydantic models.

Every field of OpenAI's API is known here, and those that other servers add (`router.api.extras`): supported, ignored,
or refused by name unless it has a value that asks for nothing (`router.api.fields`). A field that is not known at all
is refused by name too. docs/api.md lists them all, from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue

from hackkv.errors import RequestError
from router.api.extras import ChatExtras, LlamaExtras, VllmExtras
from router.api.fields import (
    REFUSAL,
    TEXT,
    Ignored,
    NullIs,
    Parts,
    Refused,
    Text,
    Whole,
    fault,
    of_kind,
    text_or_parts,
    whole,
)
from router.api.sampled import Sampled
from router.api.strict import Strict
from router.api.structured import Form, Structured
from router.api.tools.fields import ToolCall, ToolFields

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_N = 128
MAX_DIGITS = 9
"""The most digits of a token id in `logit_bias`."""
MAX_MESSAGES = 1 << 14
"""The most messages of a conversation."""
MAX_BIASES = MAX_STOP_TOKENS = 1 << 12
"""The most entries of these lists. Longer ones would hold up the router and the nodes, which read them per sequence."""

Prompt = str | tuple[int, ...]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31), Whole()]
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
BIAS: JsonSchemaValue = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": f"^[0-9]{{1,{MAX_DIGITS}}}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def _parse_prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several; each is a text or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fault("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value or _is_id(value[0]):
        return (_parse_ids(value),)
    if isinstance(value[0], str):
        for index, item in enumerate(value):
            if not isinstance(item, str):
                fault("must be a string, as the first prompt is", index)
        return tuple(value)
    return tuple(_parse_ids(item, index) for index, item in enumerate(value))


def _parse_ids(value: object, *where: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        fault("must be a list of token ids" if where and where[0] else "must be a string or token ids", *where)
    for index, item in enumerate(value):
        if not _is_id(item):
            fault("must be a token id", *where, index)
    return tuple(map(int, value))


def _is_id(value: object) -> bool:
    return type(whole(value)) is int


def _parse_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        fault(f"must be a non-empty string or a list of up to {MAX_STOPS} of them")
    for index, stop in enumerate(stops):
        if not (isinstance(stop, str) and stop):
            fault("must be a non-empty string", *(() if isinstance(value, str) else (index,)))
    return tuple(stops)


def _parse_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        fault("must map token ids to numbers from -100 to 100")
    if len(value) > MAX_BIASES:
        fault(f"has {len(value)} entries; at most {MAX_BIASES} are accepted")
    for token, weight in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_DIGITS):
            fault("is not a token id", token)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not -100 <= weight <= 100:
            fault("must be a number from -100 to 100", token)
    return tuple(sorted({int(token): float(weight) for token, weight in value.items()}.items()))


class StreamOptions(Strict):
    """Options that go with `stream: true`; without it they have nothing to say."""

    include_usage: Annotated[bool, NullIs(False)] = False
    continuous_usage_stats: Annotated[bool, NullIs(False)] = False
    """vLLM's: with `include_usage`, every event says how many tokens there are so far."""
    include_obfuscation: Annotated[Any, Ignored("events are not padded")] = None


class Generate(Sampled, Structured, VllmExtras, LlamaExtras):
    """What completions and chat have in common."""

    max_tokens: Annotated[int | None, Field(ge=0, le=1 << 30), Whole()] = None
    n: Annotated[int, Field(ge=1, le=MAX_N), Whole(), NullIs(1)] = 1
    stop: Annotated[
        tuple[str, ...], BeforeValidator(_parse_stops, json_schema_input_type=StopString | StopStrings | None)
    ] = ()
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_parse_bias), WithJsonSchema(BIAS)] = ()

    # Ours, named as in vLLM.
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Field(strict=False, max_length=MAX_STOP_TOKENS, fail_fast=True),  # JSON has no tuples
        NullIs(()),
    ] = ()
    user: Annotated[Any, Ignored("users are not told apart")] = None
    metadata: Annotated[Any, Ignored("requests are not kept")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    store: Annotated[Any, Ignored("requests are not kept")] = None

    def form(self) -> Form | None:
        """The form that the output must match, if any. Raises `RequestError` if fields contradict each other."""
        form = super().form()
        if form is not None and self.ignore_eos:
            raise RequestError(f"ignore_eos and {form.param} exclude each other", "ignore_eos")
        return form

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has its token counts."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(Generate):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(_parse_prompts, json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]]),
    ]
    echo: Annotated[bool, NullIs(False)] = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), Whole()] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N), Whole()] = None
    return_token_ids: Annotated[bool, NullIs(False)] = False
    """Adds `token_ids`, the output's token ids, to each choice or streamed delta."""
    add_special_tokens: Annotated[bool, NullIs(True)] = True
    suffix: Annotated[Any, Refused("text is continued at its end only", ("",))] = None

    def stand_in(self, *, repeated: bool) -> dict[str, Any]:
        """As many prompts of the same kinds, empty unless the answer repeats them."""
        keeps = repeated and self.echo
        return {"prompt": [(each if keeps else "") if isinstance(each, str) else [] for each in self.prompt]}

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            fault("is not supported: it must equal n or be left out", "best_of")
        if self.max_tokens == 0 and not self.echo:
            fault("may be 0 only with echo: true", "max_tokens")
        return self


class TextPart(Strict):
    """A piece of a message's content."""

    type: Annotated[Literal["text"], of_kind("text", told="this model takes text only")]
    text: str
    cache_control: Annotated[Any, Ignored("KV of common prefixes is kept without it")] = None
    prompt_cache_breakpoint: Annotated[Any, Ignored("KV of common prefixes is kept without it")] = None
    annotations: Annotated[Any, Ignored("chat templates have no place for them")] = None


class RefusalPart(Strict):
    """A model's refusal as a piece of its message."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What the model said."""
        return self.refusal


def _part_kind(part: object) -> str:
    return REFUSAL if isinstance(part, dict) and part.get("type") == "refusal" else TEXT


Part = Annotated[Annotated[TextPart, Tag(TEXT)] | Annotated[RefusalPart, Tag(REFUSAL)], Discriminator(_part_kind)]
Content = Annotated[Text | Parts[Part], text_or_parts("must be a text or a list of text parts")]


class Message(Strict):
    """One turn of a conversation. An answer of this server, or of another, is taken as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    """Stands for the content where there is none."""
    tool_calls: Annotated[tuple[ToolCall, ...], Field(strict=False)] | None = None
    tool_call_id: str | None = None
    audio: Annotated[Any, Refused("this model takes text only")] = None
    images: Annotated[Any, Refused("this model takes text only", ([],))] = None
    function_call: Annotated[Any, Refused("use tool_calls")] = None
    prefix: Annotated[Any, Refused("use continue_final_message", (False,))] = None
    annotations: Annotated[Any, Ignored("chat templates have no place for them")] = None
    cache_control: Annotated[Any, Ignored("KV of common prefixes is kept without it")] = None
    id: Annotated[Any, Ignored("chat templates have no place for it")] = None
    parsed: Annotated[Any, Ignored("the content says the same")] = None
    provider_specific_fields: Annotated[Any, Ignored("LiteLLM's copy of other fields")] = None
    reasoning: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    reasoning_content: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    reasoning_items: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None
    thinking_blocks: Annotated[Any, Ignored("earlier thoughts are not shown to the model")] = None

    @model_validator(mode="after")
    def _only_assistants_are_silent(self) -> Message:
        if self.content is None and self.role != "assistant":
            fault("is required", "content")
        if self.tool_calls and self.role != "assistant":
            fault("belong to assistants' messages", "tool_calls")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None:
            return self.refusal or ""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(Generate, ToolFields, ChatExtras):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=1 << 30), Whole()] = None
    logprobs: Annotated[bool, NullIs(False)] = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), Whole()] = None

    # Ours, named as in vLLM.
    add_generation_prompt: Annotated[bool, NullIs(True)] = True
    continue_final_message: Annotated[bool, NullIs(False)] = False
    chat_template_kwargs: dict[str, Any] | None = None

    # OpenAI's.
    safety_identifier: Annotated[Any, Ignored("users are not told apart")] = None
    prompt_cache_key: Annotated[Any, Ignored("common prefixes are found without it")] = None
    prompt_cache_options: Annotated[Any, Ignored("common prefixes are found without it")] = None
    prompt_cache_retention: Annotated[Any, Ignored("KV stays while there is room for it")] = None
    prediction: Annotated[Any, Ignored("it could only have made the same answer faster")] = None
    reasoning_effort: Annotated[Any, Ignored("the model does not think by degrees")] = None
    verbosity: Annotated[Any, Ignored("the model does not know degrees of it")] = None
    moderation: Annotated[Any, Refused("answers are not moderated")] = None
    audio: Annotated[Any, Refused("this model answers in text only")] = None
    modalities: Annotated[Any, Refused("this model answers in text only", (["text"],))] = None
    web_search_options: Annotated[Any, Refused("put what the model shall know into a message")] = None
    function_call: Annotated[Any, Refused("use tool_choice", ("none",))] = None
    functions: Annotated[Any, Refused("use tools", ([],))] = None

    def stand_in(self, *, repeated: bool) -> dict[str, Any]:
        """One empty message."""
        return {"messages": [{"role": "user", "content": ""}]}

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            fault("is only allowed with logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            fault("give max_tokens or max_completion_tokens, not both", "max_tokens")
        if self.max_tokens == 0:
            fault("must be at least 1", "max_tokens")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            fault("and add_generation_prompt exclude each other", "continue_final_message")
        return self
