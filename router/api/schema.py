"""Requests of the HTTP API, as pydantic models.

Every field of OpenAI's API is known here: served, accepted and ignored (documented as such), or refused by name unless
it has the value that means "off". A field that is not known at all is refused by name too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_N = 128

Prompt = str | tuple[int, ...]


def _neutral(*values: object) -> BeforeValidator:
    """Accept only values that ask for nothing."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in values):
            return None
        raise PydanticCustomError("unsupported", "this field is not supported; leave it out")

    return BeforeValidator(check)


def _not_none(default: Any) -> BeforeValidator:
    """OpenAI's clients may send null for a field they leave at its default."""
    return BeforeValidator(lambda value: default if value is None else value)


Unsupported = Annotated[Any, _neutral()]
Ignored = Annotated[Any, "accepted for compatibility; has no effect"]


def _parse_prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several; each is a text or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return (tuple(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and all(type(part) is int for part in item) for item in value):
            return tuple(tuple(item) for item in value)
    if value == []:
        return ((),)
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _parse_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else (None,)
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise PydanticCustomError("stop", f"must be a non-empty string or a list of up to {MAX_STOPS} of them")
    return stops


def _parse_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        bias = {int(token): float(weight) for token, weight in value.items()}  # type: ignore[attr-defined]
    except (AttributeError, ValueError, TypeError, OverflowError):
        bias = {-1: 0.0}
    if not all(token >= 0 and -100 <= weight <= 100 for token, weight in bias.items()):
        raise PydanticCustomError("logit_bias", "must map token ids to numbers from -100 to 100")
    return tuple(sorted(bias.items()))


def _parse_list(value: object) -> object:
    return () if value is None else tuple(value) if isinstance(value, list) else value


class Strict(BaseModel):
    """A JSON object in which a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Options that go with `stream: true`."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, _not_none(False)] = False
    """vLLM's: with `include_usage`, every event says how many tokens there are so far."""
    include_obfuscation: Annotated[Any, _neutral(False)] = None


class Generate(Strict):
    """What completions and chat have in common, and our own fields.

    Sampling settings that are left out, or null, are the checkpoint's own (`router.api.defaults`).
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=1 << 30)
    n: Annotated[int, Field(ge=1, le=MAX_N), _not_none(1)] = 1
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[tuple[str, ...], BeforeValidator(_parse_stops)] = ()
    stream: Annotated[bool, _not_none(False)] = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: Annotated[float, Field(ge=-2, le=2), _not_none(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), _not_none(0.0)] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_parse_bias)] = ()

    # Ours, named as in vLLM.
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    min_tokens: Annotated[int, Field(ge=0, le=1 << 30), _not_none(0)] = 0
    ignore_eos: Annotated[bool, _not_none(False)] = False
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], BeforeValidator(_parse_list)] = ()
    skip_special_tokens: Annotated[bool, _not_none(True)] = True
    return_stages: Annotated[bool, _not_none(False)] = False
    cache_salt: Annotated[str, _not_none("")] = ""
    """Only requests of equal salt share KV of a common prefix: one tenant cannot time another's prompts."""

    # OpenAI's, without effect here.
    user: Ignored = None
    metadata: Ignored = None
    service_tier: Annotated[Any, _neutral("auto", "default")] = None
    store: Annotated[Any, _neutral(False)] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed with stream: true")
        return self


class CompletionRequest(Generate):
    """POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_prompts)]
    echo: Annotated[bool, _not_none(False)] = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    return_token_ids: Annotated[bool, _not_none(False)] = False
    """Adds `token_ids`, the output's token ids, to each choice or streamed delta."""
    add_special_tokens: Annotated[bool, _not_none(True)] = True
    suffix: Annotated[Any, _neutral("")] = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "best_of is not supported: it must equal n or be left out")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens may be 0 only with echo: true")
        return self


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[Any, _neutral([])] = None

    @model_validator(mode="after")
    def _only_assistants_are_silent(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "content is required")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class ChatRequest(Generate):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 30)
    logprobs: Annotated[bool, _not_none(False)] = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    # Ours, named as in vLLM.
    add_generation_prompt: Annotated[bool, _not_none(True)] = True
    continue_final_message: Annotated[bool, _not_none(False)] = False
    chat_template_kwargs: dict[str, Any] | None = None

    # OpenAI's, without effect here.
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    parallel_tool_calls: Annotated[Any, _neutral(True, False)] = None

    # OpenAI's, not supported.
    audio: Unsupported = None
    function_call: Annotated[Any, _neutral("none")] = None
    functions: Annotated[Any, _neutral([])] = None
    modalities: Annotated[Any, _neutral(["text"])] = None
    prediction: Unsupported = None
    reasoning_effort: Annotated[Any, _neutral("none")] = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None
    tool_choice: Annotated[Any, _neutral("none", "auto")] = None
    tools: Annotated[Any, _neutral([])] = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError("max_tokens", "give max_tokens or max_completion_tokens, not both")
        if self.max_tokens == 0:
            raise PydanticCustomError("max_tokens", "max_tokens must be at least 1")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        return self
