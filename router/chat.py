"""POST /v1/chat/completions."""

from __future__ import annotations

from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from hackkv.tokenizer import Tokenizer
from hackkv.types import Sampling, Token
from router.choices import Choice, Delta
from router.generation import Backend, Generation, nth_seed, sampling_of
from router.intake import arrival, backend_of, counting_refusals, read_body
from router.reply import JsonReply, running_usage
from router.schema import ChatRequest
from router.sse import StreamReply

_ROLES = {"developer": "system"}
"""Roles that chat templates know under another name."""

routes = APIRouter()


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    backend = backend_of(request)
    with counting_refusals(backend):
        body = await read_body(request, ChatRequest, backend.model_name)
        jobs = await _plan(backend, body)
    generation = Generation(backend, f"chatcmpl-{uuid4().hex}", arrival(request), jobs, body.cache_salt)
    renderer = ChatRenderer(backend, body, generation.request_id)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


async def _plan(backend: Backend, body: ChatRequest) -> list[tuple[Choice, Sampling]]:
    backend.check_sequences(body.n)
    backend.check_token_ids(dict(body.logit_bias), "logit_bias")
    messages = [
        {"role": _ROLES.get(message.role, message.role), "content": message.text}
        | ({"name": message.name} if message.name else {})
        for message in body.messages
    ]
    ids = await backend.encode_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_arguments=body.chat_template_kwargs or {},
    )
    asked, length_param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, length_param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = backend.check_size(len(ids), asked, backend.limits.default_chat_tokens, "messages", length_param)
    sampling = sampling_of(
        body, backend.defaults, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, None
    )
    return [
        (
            Choice(nth, ids, backend.tokenizer, body.stop, sampling.min_tokens, body.skip_special_tokens),
            nth_seed(sampling, nth),
        )
        for nth in range(body.n)
    ]


class ChatRenderer:
    """Writes chat completions as OpenAI does."""

    def __init__(self, backend: Backend, body: ChatRequest, request_id: str) -> None:
        self._body, self._tokenizer = body, backend.tokenizer
        self._head = {"id": request_id, "created": int(time()), "model": backend.model_name}
        self._begun: set[int] = set()

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish,
            }
            for choice in generation.choices
        ]
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": generation.usage()}
        if self._body.return_stages:
            answer["hackkv"] = generation.report()
        return answer

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """One event; the role comes with the first, and the finish reason in one of its own, as with OpenAI."""
        index, content = delta.choice.index, {"content": delta.text}
        if index not in self._begun:
            self._begun.add(index)
            content = {"role": "assistant", **content}
        logprobs = self._logprobs([delta.token] if delta.token else [])
        events = [self._chunk(delta, {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": None})]
        if delta.finish is not None:
            ending = {"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish}
            events.append(self._chunk(delta, ending))
        return events

    def closing_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """Usage and stages, on request."""
        if not self._body.include_usage and not self._body.return_stages:
            return None
        event: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": []}
        if self._body.include_usage:
            event["usage"] = generation.usage()
        if self._body.return_stages:
            event["hackkv"] = generation.report()
        return event

    def _chunk(self, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.include_usage:
            event["usage"] = running_usage(self._body, delta)
        return event

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [_entry(self._tokenizer, token) for token in tokens], "refusal": None}


def _entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    top = [_candidate(tokenizer, other.token_id, other.logprob) for other in token.top]
    return {**_candidate(tokenizer, token.token_id, token.logprob), "top_logprobs": top}


def _candidate(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(data)}
