"""Answers of the HTTP API, as pydantic models: what `/openapi.json` says about them, and tests hold against them.

Routes write plain dictionaries, since a model for each token of each stream would cost more than the rest of the event.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """A JSON object with these fields and no other."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(AnswerModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault, as `messages[1].content[0].type`."""
    code: str


class Error(AnswerModel):
    """OpenAI's envelope."""

    error: ErrorDetail


class CachedTokens(AnswerModel):
    """Tokens of the prompt that were not computed again."""

    cached_tokens: int


class Usage(AnswerModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(AnswerModel):
    """Log-probabilities of a completion's tokens. A token that is no whole characters is named `bytes:\\xf0\\x9f`."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerModel):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None
    """With `return_token_ids`."""


class Answered(AnswerModel):
    """What all answers begin with."""

    id: str
    created: int
    model: str


class Completion(Answered):
    """A complete answer of /v1/completions. Events of a stream have the same form, and one choice or none."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    hackkv: dict[str, Any] | None = None
    """With `return_stages`: where the time went, in seconds, and what was moved, in bytes."""


class Candidate(AnswerModel):
    """A token that could have come."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(Candidate):
    """A token that came."""

    top_logprobs: list[Candidate]


class ChatLogprobs(AnswerModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None


class Called(AnswerModel):
    """What the model calls."""

    name: str
    arguments: str
    """JSON."""


class Call(AnswerModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Called


class AnswerMessage(AnswerModel):
    """What the model said. It may be sent back as it is."""

    role: Literal["assistant"]
    content: str | None
    """Null if the answer is calls of tools alone."""
    refusal: None
    reasoning_content: str | None = None
    """Its thoughts, if the model marks them."""
    tool_calls: list[Call] | None = None


class ChatChoice(AnswerModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(Answered):
    """A complete answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    hackkv: dict[str, Any] | None = None
    """With `return_stages`: where the time went, in seconds, and what was moved, in bytes."""


class CalledDelta(AnswerModel):
    """What an event adds to a call."""

    name: str | None = None
    arguments: str = ""


class CallDelta(AnswerModel):
    """A call that begins, or more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledDelta


class ChatDelta(AnswerModel):
    """What an event adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(AnswerModel):
    """What an event adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatCompletionChunk(Answered):
    """An event of a streamed answer of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    hackkv: dict[str, Any] | None = None


class Model(AnswerModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["hackkv"]
    max_model_len: int | None
    """Prompt and output in tokens; null while no node is there."""


class Models(AnswerModel):
    """The list of models, which has one entry."""

    object: Literal["list"]
    data: list[Model]


class Live(AnswerModel):
    """The event loop runs."""

    status: Literal["live"]


class Readiness(AnswerModel):
    """How many nodes of each role take requests, and which role has none."""

    status: Literal["ready", "not ready", "stopping"]
    nodes: dict[str, int]
    missing: list[str] | None = None


class NodeVersion(AnswerModel):
    """What computes on a node."""

    role: str
    kernels: Any
    codec_loss: dict[str, Any] | None


class Version(AnswerModel):
    """The program's version and its nodes."""

    version: str
    nodes: dict[str, NodeVersion]


class Tokenized(AnswerModel):
    """Tokens of a text or a conversation."""

    count: int
    max_model_len: int | None
    """Prompt and output in tokens; null while no node is there."""
    tokens: list[int]
    token_strs: list[str] | None
    """With `return_token_strs`."""


class Detokenized(AnswerModel):
    """A text."""

    prompt: str
