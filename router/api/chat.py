"""POST /v1/chat/completions."""

from __future__ import annotations

from time import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hackkv.tokenizer import Tokenizer
from hackkv.types import Sampling, Token
from router.api.answers import ChatCompletion
from router.api.caller import Caller
from router.api.choices import ChoiceCollector, Delta
from router.api.conversation import Conversations
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, request_id, served_by
from router.api.reply import JsonReply, rows_of, running_usage
from router.api.sampling import nth_seed, sampling_of
from router.api.schema import ChatRequest
from router.api.served import ServedModel
from router.api.sse import OpenAiEvents, StreamReply
from router.api.structured import Thinking

routes = APIRouter()


@routes.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}})
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    served = served_by(request)
    with counting_refusals(served):
        parsed = await read_body(request, ChatRequest)
        body = parsed.body
        jobs, thinking = await plan(served, body, parsed.prompts[0], Caller(request.receive))
    generation = Generation(served, f"chatcmpl-{request_id(request)}", arrival(request), jobs, body.cache_salt)
    renderer = ChatRenderer(served, body, generation.request_id, thinking)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


async def plan(
    served: ServedModel, body: ChatRequest, ids: tuple[int, ...], caller: Caller
) -> tuple[list[tuple[ChoiceCollector, Sampling]], Thinking]:
    """The sequences that answer a conversation, whose prompt is `ids`, and whether their answers begin with thoughts.

    Raises `RequestError` naming the field, and what compiling a grammar raises.
    """
    served.prompts.check_token_ids(dict(body.logit_bias), "logit_bias")
    asked, length_param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, length_param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = served.prompts.check_size(len(ids), asked, served.default_chat_tokens, "messages", length_param)
    thinking = served.conversations.thinking(ids)
    form = served.conversations.form(body, thinking)
    grammar = "" if form is None else await caller.unless_left(served.grammars.grammar(form))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, served.defaults, max_tokens, logprobs, grammar=grammar)
    jobs = [
        (
            ChoiceCollector(
                nth,
                ids,
                served.tokenizer,
                body.stop,
                sampling.min_tokens,
                body.skip_special_tokens,
                shown=served.conversations.shown(body),
            ),
            nth_seed(sampling, nth),
        )
        for nth in range(body.n)
    ]
    return jobs, thinking


class ChatRenderer(OpenAiEvents):
    """Writes chat completions as OpenAI does."""

    def __init__(self, served: ServedModel, body: ChatRequest, name: str, thinking: Thinking) -> None:
        self._body, self._tokenizer = body, served.tokenizer
        plain = thinking is Thinking.NEVER and not body.offered()
        super().__init__(plain=plain and not body.logprobs and not body.continuous_usage)
        self._answers = [None if plain else served.conversations.answer(body, thinking) for _ in range(body.n)]
        """The message of each choice; None where it is plain text."""
        self._head = {"id": name, "created": int(time()), "model": served.name}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._whole_choice(choice) for choice in generation.choices]
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": generation.usage()}
        if self._body.return_stages:
            answer["hackkv"] = generation.report()
        return answer

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta. As with OpenAI, a choice's first event names the role, and its last the finish."""
        index, answer = delta.choice.index, self._answers[delta.choice.index]
        finish: str | None = delta.finish
        contents: list[dict[str, Any]] = [{"content": delta.text}]
        if answer is not None:
            contents = answer.push(delta.text, delta.finish is not None) or [{}]
            finish = Conversations.finish(self._body, answer, finish)
        if delta.opening:
            contents[0] = {"role": "assistant", "content": None, **contents[0]}
        logprobs = self._logprobs([delta.token] if delta.token else [])
        events = []
        for content in contents:
            if not content and logprobs is None and not self._body.include_usage:
                continue  # a token of a call's frame, or one that is held back
            events.append({"index": index, "delta": content, "logprobs": logprobs, "finish_reason": None})
            logprobs = None  # they belong to the first event that the token makes
        if finish is not None:
            events.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish})
        return [self._chunk(delta, event) for event in events]

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """Usage and stages, on request."""
        if not self._body.include_usage and not self._body.return_stages:
            return []
        event: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": []}
        if self._body.include_usage:
            event["usage"] = generation.usage()
        if self._body.return_stages:
            event["hackkv"] = generation.report()
        return [event]

    def _whole_choice(self, choice: ChoiceCollector) -> dict[str, Any]:
        answer, finish = self._answers[choice.index], choice.finish and choice.finish.value
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if answer is not None:
            answer.push(choice.text, last=True)
            message, finish = answer.message(), Conversations.finish(self._body, answer, finish)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": finish,
        }

    def _chunk(self, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.include_usage:
            event["usage"] = running_usage(self._body, delta)
        return event

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        rows = rows_of((logprob_of(self._tokenizer, token) for token in tokens), len(tokens))
        return {"content": rows, "refusal": None}


def logprob_of(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """A token with its log-probability and those of its rivals, as OpenAI has them."""
    top = [candidate(tokenizer, other.token_id, other.logprob) for other in token.top]
    return {**candidate(tokenizer, token.token_id, token.logprob), "top_logprobs": top}


def candidate(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    """A token that came, or could have."""
    data = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(data)}
