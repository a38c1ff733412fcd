"""Answers of /v1/messages, as pydantic models (see `router.api.answers`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.answers import AnswerModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicErrorDetail(AnswerModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(AnswerModel):
    """Anthropic's envelope, also as an event where a stream breaks off."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str = ""


class AnswerText(AnswerModel):
    """A text."""

    type: Literal["text"]
    text: str


class AnswerThought(AnswerModel):
    """Thoughts, where the model marks them. They are not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class AnswerCall(AnswerModel):
    """A call of a tool, which the client runs."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """Empty in the event that begins it in a stream. An answer that was cut short has what came of it."""


AnswerBlock = Annotated[AnswerText | AnswerThought | AnswerCall, Field(discriminator="type")]


class MessageUsage(AnswerModel):
    """Token counts."""

    input_tokens: int
    """Without those of `cache_read_input_tokens`."""
    cache_read_input_tokens: int
    """Tokens of the prompt that were not computed again."""
    cache_creation_input_tokens: int
    """Always 0: what is kept costs nothing."""
    output_tokens: int


class MessageObject(AnswerModel):
    """A complete answer of /v1/messages, or one that begins. Its content may be sent back as it is."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one of `stop_sequences` that ended the answer."""
    usage: MessageUsage
    hackkv: dict[str, Any] | None = None
    """With `return_stages`: where the time went, in seconds, and what was moved, in bytes."""


class BlockDelta(AnswerModel):
    """What an event adds to a block, or in the end to the message."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageEvent(AnswerModel):
    """An event of a streamed answer of /v1/messages; its `type` says which of the fields it has."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip
    message: MessageObject | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: BlockDelta | None = None
    usage: MessageUsage | None = None
    error: AnthropicErrorDetail | None = None
    hackkv: dict[str, Any] | None = None
    """Of the `message_delta`, with `return_stages`."""


class Counted(AnswerModel):
    """Tokens of a prompt."""

    input_tokens: int
