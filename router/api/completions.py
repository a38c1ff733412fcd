"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from time import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hackkv.logprobs import Scores
from hackkv.tokenizer import Detokenizer, Tokenizer
from hackkv.types import Sampling, Token
from router.api.answers import Completion
from router.api.caller import Caller
from router.api.choices import ChoiceCollector, Delta
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, request_id, served_by
from router.api.reply import JsonReply, rows_of, running_usage
from router.api.sampling import nth_seed, sampling_of
from router.api.schema import CompletionRequest
from router.api.served import ServedModel
from router.api.sse import OpenAiEvents, StreamReply
from router.api.tokenize import Parsed

DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens` of a completion."""

routes = APIRouter()


@routes.post("/v1/completions", responses={200: {"model": Completion}})
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    served = served_by(request)
    with counting_refusals(served):
        parsed = await read_body(request, CompletionRequest)
        caller = Caller(request.receive)
        jobs = await _plan(served, parsed, caller)
        starts = await _starts(served, parsed.body, caller)
        texts = await _texts(served, parsed, caller)
    body = parsed.body
    generation = Generation(served, f"cmpl-{request_id(request)}", arrival(request), jobs, body.cache_salt)
    renderer = CompletionRenderer(served, body, generation.request_id, texts, starts)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


async def _plan(
    served: ServedModel, parsed: Parsed[CompletionRequest], caller: Caller
) -> list[tuple[ChoiceCollector, Sampling]]:
    """One choice for each prompt and each of its n continuations."""
    body = parsed.body
    served.prompts.check_token_ids(dict(body.logit_bias), "logit_bias")
    scoring = body.max_tokens == 0
    form = body.form()
    grammar = "" if form is None else await caller.unless_left(served.grammars.grammar(form))
    jobs: list[tuple[ChoiceCollector, Sampling]] = []
    for ids in parsed.prompts:
        max_tokens = served.prompts.check_size(len(ids), 1 if scoring else body.max_tokens, DEFAULT_TOKENS, "prompt")
        sampling = sampling_of(
            body, served.defaults, max_tokens, body.logprobs, body.logprobs if body.echo else None, grammar
        )
        for nth in range(body.n):
            choice = ChoiceCollector(
                len(jobs),
                ids,
                served.tokenizer,
                body.stop,
                sampling.min_tokens,
                body.skip_special_tokens,
                wants_tokens=not scoring,
                echoes=body.echo,
            )
            jobs.append((choice, nth_seed(sampling, nth)))
    return jobs


async def _starts(served: ServedModel, body: CompletionRequest, caller: Caller) -> dict[int, list[int]]:
    """The offsets of a prompt's tokens in its text, by prompt, for prompts that are texts and will be reported."""
    if not body.echo or body.logprobs is None:
        return {}
    starts, found = served.tokenizer.starts, dict[int, list[int]]()
    for nth, prompt in enumerate(body.prompt):
        if isinstance(prompt, str) and prompt:  # a thread does not hold the interpreter's lock meanwhile
            found[nth] = await caller.unless_left(asyncio.to_thread(starts, prompt, body.add_special_tokens))
    return found


async def _texts(served: ServedModel, parsed: Parsed[CompletionRequest], caller: Caller) -> dict[int, str]:
    """The texts of prompts that will be echoed, by prompt."""
    if not parsed.body.echo:
        return {}
    found = dict[int, str]()
    for nth, (prompt, ids) in enumerate(zip(parsed.body.prompt, parsed.prompts, strict=True)):
        if isinstance(prompt, str):
            found[nth] = prompt
        else:  # a thread does not hold the interpreter's lock meanwhile
            found[nth] = await caller.unless_left(asyncio.to_thread(served.tokenizer.decode, ids))
    return found


class CompletionRenderer(OpenAiEvents):
    """Writes completions as OpenAI does."""

    def __init__(
        self,
        served: ServedModel,
        body: CompletionRequest,
        name: str,
        texts: Mapping[int, str],
        starts: Mapping[int, Sequence[int]],
    ) -> None:
        """`name` is the answer's id. `texts` are those of echoed prompts; `starts` has the offsets of the tokens of
        some of them."""
        super().__init__(plain=body.logprobs is None and not body.return_token_ids and not body.continuous_usage)
        self._body, self._tokenizer = body, served.tokenizer
        self._head = {
            "id": name,
            "object": "text_completion",
            "created": int(time()),
            "model": served.name,
        }
        self._texts, self._starts = texts, starts
        self._name = partial(token_name, served.tokenizer)
        self._tells_usage = body.include_usage  # each event asks, and pydantic's fields are slow
        self._offsets: dict[int, Offsets] = {}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        choices = [
            self._choice(choice, choice.text, choice.tokens, choice.finish, choice.echoes)
            for choice in generation.choices
        ]
        answer = {**self._head, "choices": choices, "usage": generation.usage()}
        if self._body.return_stages:
            answer["hackkv"] = generation.report()
        return answer

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """One event; the echoed prompt comes with the first."""
        choice, tokens = delta.choice, [delta.token] if delta.token else []
        echo = choice.echoes and delta.opening
        event = {**self._head, "choices": [self._choice(choice, delta.text, tokens, delta.finish, echo)]}
        if self._tells_usage:
            event["usage"] = running_usage(self._body, delta)
        return [event]

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """Usage and stages, on request."""
        if not self._body.include_usage and not self._body.return_stages:
            return []
        event: dict[str, Any] = {**self._head, "choices": []}
        if self._body.include_usage:
            event["usage"] = generation.usage()
        if self._body.return_stages:
            event["hackkv"] = generation.report()
        return [event]

    def _prompt_text(self, choice: ChoiceCollector) -> str:
        return self._texts[choice.index // self._body.n]

    def _choice(
        self, choice: ChoiceCollector, text: str, tokens: list[Token], finish: str | None, echo: bool
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(choice, tokens, echo)
        if echo:
            text = self._prompt_text(choice) + text
        answer = {"text": text, "index": choice.index, "logprobs": logprobs, "finish_reason": finish}
        if self._body.return_token_ids:
            answer["token_ids"] = rows_of((token.token_id for token in tokens), len(tokens))
        return answer

    def _logprobs(self, choice: ChoiceCollector, tokens: list[Token], echo: bool) -> dict[str, Any]:
        name = self._name
        ids = [token.token_id for token in tokens]
        owns: Iterable[float | None] = (token.logprob for token in tokens)
        tops: Iterable[Any] = (
            alternatives(name, token.token_id, token.logprob, [(other.token_id, other.logprob) for other in token.top])
            for token in tokens
        )
        if echo:
            ids = [*choice.prompt_ids, *ids]
            scores, scored = choice.prompt_logprobs, choice.prompt_ids[1:]
            nothing = (None,)  # comes before the first token, so it has no probability
            owns = chain(nothing, scores.own, owns)
            tops = chain(nothing, starmap(partial(_scored, name), zip(scored, scores, strict=True)), tops)
        columns: dict[str, Iterable[Any]] = {
            "text_offset": self._begin(choice, tokens, echo),
            "token_logprobs": owns,
            "tokens": map(name, ids),
            "top_logprobs": tops,
        }
        return {key: rows_of(column, len(ids)) for key, column in columns.items()}

    def _begin(self, choice: ChoiceCollector, tokens: list[Token], echo: bool) -> Iterator[int]:
        """Yield the offsets of tokens in the text."""
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = Offsets(self._tokenizer, self._body.skip_special_tokens)
        if echo:
            echoed = Offsets(self._tokenizer, skip_special_tokens=True)
            yield from self._starts.get(choice.index // self._body.n) or map(echoed.push, choice.prompt_ids)
            offsets.start = len(self._prompt_text(choice))
        for token in tokens:
            yield offsets.push(token.token_id)


class Offsets:
    """The offset of each token of a text, in characters. A token within a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.start = 0
        """The offset at which the text begins."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._shown = 0

    def push(self, token_id: int) -> int:
        """Take a token. Returns the offset at which it begins."""
        offset = self.start + self._shown
        self._shown += len(self._detokenizer.push(token_id))
        return offset


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token as text; as OpenAI does, `bytes:` and its bytes if they are no whole characters: `bytes:\xf0\x9f`."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def alternatives(
    name: Callable[[int], str], token_id: int, logprob: float | None, best: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """The alternatives of one token. The chosen token is always among them.

    OpenAI keys alternatives by name, and tokens can share one. The key then belongs to the chosen token if it has that
    name, else to the most probable token.
    """
    top = {name(other): value for other, value in reversed(best)}
    if logprob is not None:
        top[name(token_id)] = logprob
    return top


def _scored(name: Callable[[int], str], token_id: int, scores: Scores) -> dict[str, float]:
    return alternatives(name, token_id, *scores)
