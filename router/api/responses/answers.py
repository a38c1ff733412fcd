"""Answers of /v1/responses, as pydantic models (see `router.api.answers`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.answers import AnswerModel, ChatToken

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerModel):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[ChatToken]
    """On request."""


class ThoughtText(AnswerModel):
    """Thoughts."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerModel):
    """What the model said. It may be sent back as it is."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputThought(AnswerModel):
    """What the model thought, where it marks its thoughts."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    """Always empty: thoughts come whole."""
    content: list[ThoughtText]


class OutputCall(AnswerModel):
    """A call of a function, which the client runs."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """JSON."""


OutputItem = Annotated[OutputMessage | OutputThought | OutputCall, Field(discriminator="type")]


class InputDetails(AnswerModel):
    """Tokens of the input that were not computed again."""

    cached_tokens: int
    cache_write_tokens: int
    """Always 0: what is kept costs nothing."""


class OutputDetails(AnswerModel):
    """Always 0: thoughts are counted with the rest."""

    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(AnswerModel):
    """What broke the answer off."""

    code: str
    message: str
    type: str
    param: str | None


class Incomplete(AnswerModel):
    """Why an answer ends early."""

    reason: Literal["max_output_tokens"]


class ResponseObject(AnswerModel):
    """A complete answer of /v1/responses, or one that grows."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: Failure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    previous_response_id: None
    background: Literal[False]
    store: Literal[False]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    hackkv: dict[str, Any] | None = None
    """With `return_stages`: where the time went, in seconds, and what was moved, in bytes."""


class ResponseEvent(AnswerModel):
    """An event of a streamed answer of /v1/responses; its `type` says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: Annotated[OutputText | ThoughtText, Field(discriminator="type")] | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: list[ChatToken] | None = None
