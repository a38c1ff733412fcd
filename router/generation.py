"""The sequences of one HTTP request: where they come from, how they run, and what is reported about them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hackkv.defaults import SamplingDefaults
from hackkv.errors import RequestError
from hackkv.timing import StageClock
from hackkv.tokenizer import Tokenizer
from hackkv.types import Request, Sampling
from router.account import kv_account, time_account
from router.choices import Choice, Delta, token_counts
from router.dispatch import Dispatcher
from router.errors import outcome_of
from router.flight import Flight
from router.journal import Journal
from router.metrics import Metrics, Outcome
from router.schema import Generate, Prompt
from router.scopes import unwrapped

LONG_TEXT = 16384
"""Characters from which tokenizing moves to a thread, so that other requests' tokens keep flowing."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What one HTTP request may ask for."""

    max_prompt_tokens: int
    max_sequences: int
    default_chat_tokens: int


@dataclass(frozen=True, slots=True)
class Backend:
    """What the routes work with."""

    model_name: str
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    metrics: Metrics
    limits: PromptLimits
    defaults: SamplingDefaults
    journal: Journal

    async def encode(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a prompt; checks ids that the client chose. An empty prompt becomes BOS if there is one."""
        if not isinstance(prompt, str):
            self.check_token_ids(prompt, "prompt")
            ids = list(prompt)
        elif len(prompt) < LONG_TEXT:
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        if not ids:
            raise RequestError("the prompt is empty, and this model has no token that begins a text", "prompt")
        return tuple(ids)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_arguments: Mapping[str, object],
    ) -> tuple[int, ...]:
        """Token ids of a conversation."""
        arguments = (messages, add_generation_prompt, continue_final_message, template_arguments)
        if sum(len(str(message.get("content"))) for message in messages) < LONG_TEXT:
            ids = self.tokenizer.chat(*arguments)
        else:
            ids = await asyncio.to_thread(self.tokenizer.chat, *arguments)
        if not ids:
            raise RequestError("the chat template made an empty prompt of this conversation", "messages")
        return tuple(ids)

    def check_token_ids(self, ids: Iterable[int], param: str) -> None:
        """Raises `RequestError` if the model has no such token."""
        if bad := next((token for token in ids if not 0 <= token < self.tokenizer.vocab_size), None):
            raise RequestError(f"{param}: {bad} is not a token id (0 to {self.tokenizer.vocab_size - 1})", param)

    def check_sequences(self, count: int) -> None:
        """Raises `RequestError` if one HTTP request asks for too many sequences."""
        if count > self.limits.max_sequences:
            raise RequestError(f"{count} sequences asked for at once; at most {self.limits.max_sequences}", "n")

    def check_size(
        self, prompt_tokens: int, max_tokens: int | None, default: int, param: str, length_param: str = "max_tokens"
    ) -> int:
        """The number of tokens to generate. `param` names the field of the prompt, `length_param` that of `max_tokens`.

        Raises `RequestError` with the counts if they do not fit, and `Unavailable` while no node can say how much fits.
        """
        fleet = self.dispatcher.fleet
        context = fleet.max_context
        room = min(context, fleet.max_request_tokens)
        limit = min(self.limits.max_prompt_tokens, room - 1)
        if prompt_tokens > limit:
            raise RequestError(f"{param} has {prompt_tokens} tokens; this model serves at most {limit}", param)
        if max_tokens is None:
            return min(default, room - prompt_tokens)
        if prompt_tokens + max_tokens > room:
            raise RequestError(
                f"{length_param} is {max_tokens} and {param} has {prompt_tokens} tokens: {prompt_tokens + max_tokens} "
                f"together, but this model serves at most {room}, which leaves {room - prompt_tokens} to generate",
                length_param,
            )
        return max_tokens


def sampling_of(
    body: Generate, defaults: SamplingDefaults, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """Sampling parameters of a request; draws a seed if the client gave none, so that a retry repeats the draw."""
    given = body.model_dump(include=set(SamplingDefaults.model_fields), exclude_none=True)
    chosen = defaults.model_copy(update=given)
    return Sampling(
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens, max_tokens),
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=max(0, chosen.top_k),  # vLLM's -1 means off as well
        min_p=chosen.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=chosen.repetition_penalty,
        logit_bias=body.logit_bias,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def nth_seed(sampling: Sampling, index: int) -> Sampling:
    """Sampling of choice `index`: the seed counts up, wrapping as a signed 64-bit number does."""
    seed = (sampling.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
    return replace(sampling, seed=seed)


class Generation:
    """Runs the sequences of one HTTP request side by side."""

    def __init__(
        self,
        backend: Backend,
        request_id: str,
        arrived: float,
        jobs: Sequence[tuple[Choice, Sampling]],
        cache_salt: str = "",
    ) -> None:
        self._backend = backend
        self.request_id = request_id
        self.choices = [choice for choice, _ in jobs]
        self._flights = [
            Flight(
                Request(f"{request_id}-{choice.index}", choice.prompt_ids, sampling, cache_salt),
                StageClock(start=arrived),
                choice.take,
            )
            for choice, sampling in jobs
        ]
        for choice, flight in zip(self.choices, self._flights, strict=True):
            choice.flight = flight

    async def run(self, on_delta: Callable[[Delta], None] | None = None) -> None:
        """Run to the end. Raises the first error; the other sequences are then cancelled."""
        if on_delta is not None:
            for choice in self.choices:
                choice.on_delta = on_delta
        for flight in self._flights:
            self._backend.journal.began(flight)
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._backend.dispatcher.serve(flight)) for flight in self._flights]
                await asyncio.wait(running)

    def settle(self, error: BaseException | None) -> None:
        """The last byte is out, or never will be: count everything."""
        for flight, choice in zip(self._flights, self.choices, strict=True):
            if choice.finish is not None:
                outcome = Outcome(choice.finish)
            elif error is not None:
                outcome = outcome_of(error)
            else:
                outcome = Outcome.FAILED
            self._backend.metrics.ended(flight, outcome)
            self._backend.journal.ended(flight, outcome)

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts. A prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt_ids): choice for choice in reversed(self.choices)}.values()
        prompt = sum(len(choice.prompt_ids) for choice in prompts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        return token_counts(prompt, completion, sum(choice.cached_tokens for choice in prompts))

    def report(self) -> dict[str, Any]:
        """Where the time went and what was moved: the opt-in field `hackkv`. Seconds and bytes.

        With several sequences the stages are those of the one that ended last, since it made the client wait.
        """
        flight = max(self._flights, key=lambda flight: flight.token_at_s[-1] if flight.token_at_s else 0.0)
        receipts = [receipt for each in self._flights for receipt in each.receipts]
        return {
            **time_account(flight.clock),
            "kv": kv_account(self._backend.dispatcher.fleet.codec, receipts),
            "prefill_node": flight.prefill_node,
            "decode_node": flight.decode_node,
            "attempts": flight.attempts,
        }
