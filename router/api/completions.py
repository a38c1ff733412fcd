"""POST /v1/completions."""

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
from router.api.schema import CompletionRequest
from router.api.served import ServedModel
from router.api.sse import StreamReply

DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens` of a completion."""

routes = APIRouter()


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    served = served_by(request)
    with counting_refusals(served):
        body = await read_body(request, CompletionRequest, served.name)
        jobs = await _plan(served, body, Caller(request.receive))
    generation = Generation(served, f"cmpl-{uuid4().hex}", arrival(request), jobs, body.cache_salt)
    renderer = CompletionRenderer(served, body, generation.request_id)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


async def _plan(served: ServedModel, body: CompletionRequest, caller: Caller) -> list[tuple[Choice, Sampling]]:
    """One choice for each prompt and each of its n continuations."""
    served.prompts.check_sequences(len(body.prompt) * body.n)
    served.prompts.check_token_ids(dict(body.logit_bias), "logit_bias")
    scoring = body.max_tokens == 0
    jobs: list[tuple[Choice, Sampling]] = []
    for ids in await served.prompts.encode(body.prompt, body.add_special_tokens, caller):
        max_tokens = served.prompts.check_size(len(ids), 1 if scoring else body.max_tokens, DEFAULT_TOKENS, "prompt")
        sampling = sampling_of(body, served.defaults, max_tokens, body.logprobs, body.logprobs if body.echo else None)
        for nth in range(body.n):
            choice = Choice(
                len(jobs),
                ids,
                served.tokenizer,
                body.stop,
                sampling.min_tokens,
                body.skip_special_tokens,
                wants_tokens=not scoring,
            )
            jobs.append((choice, nth_seed(sampling, nth)))
    return jobs


class CompletionRenderer:
    """Writes completions as OpenAI does."""

    def __init__(self, served: ServedModel, body: CompletionRequest, request_id: str) -> None:
        self._body, self._tokenizer = body, served.tokenizer
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time()),
            "model": served.name,
        }
        self._prompts = [prompt if isinstance(prompt, str) else None for prompt in body.prompt]
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._whole_choice(choice) for choice in generation.choices]
        answer = {**self._head, "choices": choices, "usage": generation.usage()}
        if self._body.return_stages:
            answer["hackkv"] = generation.report()
        return answer

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """One event; the echoed prompt comes with the first."""
        choice, text, tokens = delta.choice, delta.text, [delta.token] if delta.token else []
        prompt_tokens: tuple[Token, ...] | None = None
        if self._body.echo and choice.index not in self._begun:
            text, prompt_tokens = self._prompt_text(choice) + text, choice.prompt_logprobs
        self._begun.add(choice.index)
        event = {
            **self._head,
            "choices": [self._choice(choice, text, tokens, prompt_tokens, delta.finish)],
        }
        if self._body.include_usage:
            event["usage"] = running_usage(self._body, delta)
        return [event]

    def closing_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """Usage and stages, on request."""
        if not self._body.include_usage and not self._body.return_stages:
            return None
        event: dict[str, Any] = {**self._head, "choices": []}
        if self._body.include_usage:
            event["usage"] = generation.usage()
        if self._body.return_stages:
            event["hackkv"] = generation.report()
        return event

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        if not self._body.echo:
            return self._choice(choice, choice.text, choice.tokens, None, choice.finish)
        text = self._prompt_text(choice) + choice.text
        return self._choice(choice, text, choice.tokens, choice.prompt_logprobs, choice.finish)

    def _prompt_text(self, choice: Choice) -> str:
        given = self._prompts[choice.index // self._body.n]
        return self._tokenizer.decode(choice.prompt_ids) if given is None else given

    def _choice(
        self,
        choice: Choice,
        text: str,
        tokens: list[Token],
        prompt_tokens: tuple[Token, ...] | None,
        finish: str | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(choice, tokens, prompt_tokens)
        answer = {"text": text, "index": choice.index, "logprobs": logprobs, "finish_reason": finish}
        if self._body.return_token_ids:
            answer["token_ids"] = [token.token_id for token in tokens]
        return answer

    def _logprobs(
        self, choice: Choice, tokens: list[Token], prompt_tokens: tuple[Token, ...] | None
    ) -> dict[str, list[Any]]:
        rows = [_row(self._tokenizer, token) for token in tokens]
        if prompt_tokens is not None:  # nothing comes before the first token, so it has no probability
            first = (self._tokenizer.token_text(choice.prompt_ids[0]), None, None)
            rows = [first, *(_row(self._tokenizer, token) for token in prompt_tokens), *rows]
        offsets = []
        offset = self._offsets.get(choice.index, 0)
        for text, _, _ in rows:
            offsets.append(offset)
            offset += len(text)
        self._offsets[choice.index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "tokens": [text for text, _, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
        }


def _row(tokenizer: Tokenizer, token: Token) -> tuple[str, float | None, dict[str, float] | None]:
    """Text, log-probability and alternatives of one token; the chosen one is always among the alternatives.

    OpenAI keys alternatives by text, and several tokens can have the same text (parts of characters all show as
    U+FFFD). The key then belongs to the chosen token if it has that text, else to the most probable token.
    """
    text = tokenizer.token_text(token.token_id)
    top = {tokenizer.token_text(other.token_id): other.logprob for other in reversed(token.top)}
    if token.logprob is not None:
        top[text] = token.logprob
    return text, token.logprob, top
