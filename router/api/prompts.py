"""From bodies to token ids, checked against what the fleet serves.

Nothing here holds up the event loop. A small body takes about a millisecond and is parsed where it is; a large one goes
to a process of its own (`router.api.parsers`). Such processes are few and their places are shared fairly
(`router.api.fair_line`). The wait for a place and the work together have a deadline, and both end when the client
leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine
from contextlib import closing
from typing import Any, Final, TypeVar

from hackkv.errors import RequestError
from router.api.caller import Caller
from router.api.conversation import Conversations
from router.api.fair_line import FairLine
from router.api.parser import ParseJob
from router.api.parsers import Parsers
from router.api.strict import Body, Data, Prompted
from router.api.texts import Question, answer_question
from router.api.tokenize import Bounds, Parsed, check_prompt, check_token_ids, tokenize, validate
from router.config import LimitsConfig
from router.fleet.capacity import Capacity
from router.scopes import deadline

SMALL: Final = 4096
"""Bytes of a body up to which it is parsed on the event loop."""

BodyT = TypeVar("BodyT", bound=Prompted)
T = TypeVar("T")


class PromptParser:
    """Parses bodies and checks the size of their prompts."""

    def __init__(
        self,
        model_name: str,
        conversations: Conversations,
        capacity: Capacity,
        limits: LimitsConfig,
        tokenize_s: float,
        strict: bool = False,
    ) -> None:
        """`tokenize_s` limits the seconds that a large body waits for a process and takes there, together. If `strict`,
        hints that would be ignored are refused."""
        self.tokenizer = conversations.tokenizer
        self._model_name, self._capacity, self._limits, self._tokenize_s = model_name, capacity, limits, tokenize_s
        self._conversations, self._strict = conversations, strict
        self.parsers = Parsers(self.tokenizer)
        self._line = FairLine(limits.parsers, limits.max_parsing)

    async def parse(self, kind: type[BodyT], data: Data, caller: Caller, client: str) -> Parsed[BodyT]:
        """A checked body and its token ids. `client` says whose work it is.

        Raises `RequestError` naming the field, `HTTPError` 404, `Overloaded`, `DeadlineExceeded`, `Cancelled` if the
        client leaves, and `Unavailable` while no node can say how much fits.
        """
        if len(data) <= SMALL:
            body = validate(kind, data, self._model_name, self._strict)
            return Parsed(body, tokenize(self._conversations, body, self._bounds(self._room())))
        job = self._job(kind, self._bounds(self._room()))
        return await self._in_line(self.parsers.parse(kind, data, job), len(data), caller, client)

    async def answer(self, kind: type[Question], data: Data, caller: Caller, client: str) -> bytes:
        """The JSON that answers a question. Raises what `parse` raises, but for `Unavailable`: it needs no node."""
        context = self._room() if self._capacity.known else None
        bounds = Bounds(self._limits.max_prompt_tokens, self._limits.max_sequences, context)
        if len(data) <= SMALL:
            body = validate(kind, data, self._model_name, self._strict)
            return answer_question(self._conversations, body, bounds)
        return await self._in_line(self.parsers.answer(data, self._job(kind, bounds)), len(data), caller, client)

    def _job(self, kind: type[Body], bounds: Bounds) -> ParseJob:
        return ParseJob(kind.__name__, self._model_name, bounds, self._conversations.config, self._strict)

    async def _in_line(self, work: Coroutine[Any, Any, T], size: int, caller: Caller, client: str) -> T:
        """Do the work of a large body when its client is next in line."""

        async def placed() -> T:
            async with self._line.place(client, size):
                return await work

        with closing(work):  # else nobody would await it if the wait for a place fails
            async with deadline(self._tokenize_s, "reading the request"):
                return await caller.unless_left(placed())

    def check_token_ids(self, ids: Collection[int], param: str) -> None:
        """Raises `RequestError` if the model has no such token."""
        check_token_ids(self.tokenizer, ids, param)

    def check_size(
        self, prompt_tokens: int, max_tokens: int | None, default: int, param: str, length_param: str = "max_tokens"
    ) -> int:
        """The number of tokens to generate. Errors name field `param` (the prompt) or `length_param` (`max_tokens`).

        Raises `RequestError` with the counts if they do not fit, and `Unavailable` while no node can say how much fits.
        """
        room = self._room()
        check_prompt(prompt_tokens, self._bounds(room), param)
        if max_tokens is None:
            return min(default, room - prompt_tokens)
        if prompt_tokens + max_tokens > room:
            raise RequestError(
                f"{length_param} is {max_tokens} and {param} has {prompt_tokens} tokens: {prompt_tokens + max_tokens} "
                f"together, but this model serves at most {room}, which leaves {room - prompt_tokens} to generate",
                length_param,
            )
        return max_tokens

    def _bounds(self, room: int) -> Bounds:
        return Bounds(min(self._limits.max_prompt_tokens, room - 1), self._limits.max_sequences)

    def _room(self) -> int:
        """Tokens of one request that the fleet can hold. Raises `Unavailable` before it is known."""
        return min(self._capacity.max_context, self._capacity.max_request_tokens)
