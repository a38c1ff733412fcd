"""From prompts to token ids, checked against what the fleet serves.

Nothing here blocks the event loop. A long text is tokenized on a thread, where the tokenizer releases the interpreter's
lock. There are few such threads, so that many long texts leave processors to other work. A text that waits for a thread
has a deadline, and leaves the line when its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from hackkv.errors import RequestError
from hackkv.tokenizer import Tokenizer
from router.api.caller import Caller
from router.api.schema import Prompt
from router.config import LimitsConfig
from router.fleet.capacity import Capacity
from router.scopes import deadline

LONG_TEXT: Final = 4096
"""Characters from which tokenizing moves to a thread; fewer take about a millisecond."""
THREADS: Final = 2

T = TypeVar("T")


class Prompts:
    """Turns prompts into token ids and checks their size."""

    def __init__(self, tokenizer: Tokenizer, capacity: Capacity, limits: LimitsConfig, tokenize_s: float) -> None:
        """`tokenize_s` limits the seconds that a text waits for a thread and takes there, together."""
        self.tokenizer = tokenizer
        self._capacity, self._limits, self._tokenize_s = capacity, limits, tokenize_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")

    async def encode(
        self, prompts: Sequence[Prompt], add_special_tokens: bool, caller: Caller
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt; checks ids that the client chose. An empty prompt becomes BOS if there is one."""
        characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, str):
                work = partial(self.tokenizer.encode, prompt, add_special_tokens)
                encoded.append(self._or_bos(await self._run(work, characters, caller)))
            else:
                self.check_token_ids(prompt, "prompt")
                encoded.append(self._or_bos(prompt))
        return encoded

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        template_arguments: Mapping[str, object],
        caller: Caller,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[int, ...]:
        """Token ids of a conversation."""
        work = partial(self.tokenizer.chat, messages, add_generation_prompt, continue_final_message, template_arguments)
        characters = sum(len(str(message.get("content"))) for message in messages)
        ids = await self._run(work, characters, caller)
        if not ids:
            raise RequestError("the chat template made an empty prompt of this conversation", "messages")
        return tuple(ids)

    def check_token_ids(self, ids: Collection[int], param: str) -> None:
        """Raises `RequestError` if the model has no such token."""
        size = self.tokenizer.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            bad = next(token for token in ids if not 0 <= token < size)
            raise RequestError(f"{param}: {bad} is not a token id (0 to {size - 1})", param)

    def check_sequences(self, count: int) -> None:
        """Raises `RequestError` if one HTTP request asks for too many sequences."""
        if count > self._limits.max_sequences:
            raise RequestError(f"{count} sequences asked for at once; at most {self._limits.max_sequences}", "n")

    def check_size(
        self, prompt_tokens: int, max_tokens: int | None, default: int, param: str, length_param: str = "max_tokens"
    ) -> int:
        """The number of tokens to generate. Errors name field `param` (the prompt) or `length_param` (`max_tokens`).

        Raises `RequestError` with the counts if they do not fit, and `Unavailable` while no node can say how much fits.
        """
        room = min(self._capacity.max_context, self._capacity.max_request_tokens)
        limit = min(self._limits.max_prompt_tokens, room - 1)
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

    def _or_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        if ids:
            return tuple(ids)
        if self.tokenizer.bos_id is None:
            raise RequestError("the prompt is empty, and this model has no token that begins a text", "prompt")
        return (self.tokenizer.bos_id,)

    async def _run(self, work: Callable[[], T], characters: int, caller: Caller) -> T:
        """The result of `work`, which tokenizes for a request of so many characters."""
        if characters < LONG_TEXT:
            return work()
        async with deadline(self._tokenize_s, "tokenizing the prompt"):
            return await caller.unless_left(self._on_a_thread(work))

    async def _on_a_thread(self, work: Callable[[], T]) -> T:
        """The result of `work`. If the caller is cancelled while `work` waits for a thread, `work` never starts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
