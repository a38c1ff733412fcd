"""POST /v1/chat/completions."""

from __future__ import annotations

from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from hackkv.tokenizer import Tokenizer
from hackkv.types import Sampling, Token
from router.api.caller import Caller
from router.api.choices import Choice, Delta
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, served_by
from router.api.reply import JsonReply, running_usage
from router.api.sampling import nth_seed, sampling_of
from router.api.schema import ChatRequest
from router.api.served import ServedModel
from router.api.sse import StreamReply

_ROLES = {"developer": "system"}
"""Roles that chat templates know under another name."""

routes = APIRouter()


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    served = served_by(request)
    with counting_refusals(served):
        body = await read_body(request, ChatRequest, served.name)
        jobs = await _plan(served, body, Caller(request.receive))
    generation = Generation(served, f"chatcmpl-{uuid4().hex}", arrival(request), jobs, body.cache_salt)
    renderer = ChatRenderer(served, body, generation.request_id)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


async def _plan(served: ServedModel, body: ChatRequest, caller: Caller) -> list[tuple[Choice, Sampling]]:
    served.prompts.check_sequences(body.n)
    served.prompts.check_token_ids(dict(body.logit_bias), "logit_bias")
    messages = [
        {"role": _ROLES.get(message.role, message.role), "content": message.text}
        | ({"name": message.name} if message.name else {})
        for message in body.messages
    ]
    ids = await served.prompts.encode_chat(
        messages,
        body.chat_template_kwargs or {},
        caller,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    asked, length_param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, length_param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = served.prompts.check_size(len(ids), asked, served.default_chat_tokens, "messages", length_param)
    sampling = sampling_of(body, served.defaults, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, None)
    return [
        (
            Choice(nth, ids, served.tokenizer, body.stop, sampling.min_tokens, body.skip_special_tokens),
            nth_seed(sampling, nth),
        )
        for nth in range(body.n)
    ]


class ChatRenderer:
    """Writes chat completions as OpenAI does."""

    def __init__(self, served: ServedModel, body: ChatRequest, request_id: str) -> None:
        self._body, self._tokenizer = body, served.tokenizer
        self._head = {"id": request_id, "created": int(time()), "model": served.name}
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
        """The events of one delta. As with OpenAI, a choice's first event names the role, and its last the finish."""
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
