"""The loop of a prefill node on one page: schedule, pass, commit, again.

Everything here belongs to the event loop's thread. The engine's thread touches only the arguments of a pass. When a
pass fails, the loop ends the prompts concerned and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hackkv.errors import HackkvError, SequenceError
from hackkv.heap import REST_S, within
from prefill_node.engine import PrefillEngine
from prefill_node.fetch_choice import PassSpeed
from prefill_node.prefix_pool import PrefixPool
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from prefill_node.work import FirstToken, Work

log = logging.getLogger(__name__)


class Passes:
    """Runs the passes that the scheduler plans, and answers each prompt with its first token. `close` ends the loop."""

    def __init__(
        self,
        engine: PrefillEngine,
        scheduler: PrefillScheduler[Work],
        pool: PrefixPool,
        admit: Callable[[Work], bool],
        speed: PassSpeed,
    ) -> None:
        """`admit` says, before a prompt starts, whether host memory has room for its KV. `speed` measures passes."""
        self._engine = engine
        self._scheduler = scheduler
        self._pool = pool
        self._admit, self._speed = admit, speed
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._first_tokens: dict[Work, asyncio.Future[FirstToken]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefill-engine")
        self._loop = asyncio.create_task(self._run())

    def expect(self, prompt: Prompt[Work]) -> asyncio.Future[FirstToken]:
        """Announce a prompt that is about to `join`; return its first token. `leave` must follow in every case."""
        first_token = self._first_tokens[prompt.owner] = asyncio.get_running_loop().create_future()
        return first_token

    def join(self, prompt: Prompt[Work]) -> None:
        """Queue a prompt that was announced."""
        self._scheduler.add(prompt)
        self._wake.set()

    def leave(self, prompt: Prompt[Work]) -> None:
        """End a prompt, complete or not. A pass that computes it goes on, and its first token is dropped."""
        self._scheduler.leave(prompt)
        first_token = self._first_tokens.pop(prompt.owner)
        if first_token.done() and not first_token.cancelled():
            first_token.exception()  # marks it as retrieved: nobody may have awaited it
        self._left.set()

    def wake(self) -> None:
        """Schedule again: there may be room for the next prompt."""
        self._wake.set()

    def fail_all(self, error: HackkvError) -> None:
        """Answer every prompt that has no first token yet with `error`."""
        for work in tuple(self._first_tokens):
            self._answer(work, error)

    async def until_idle(self) -> None:
        """Return when every prompt has left."""
        while self._first_tokens:
            self._left.clear()
            await self._left.wait()

    async def close(self) -> None:
        """Stop after the current pass."""
        self._loop.cancel()
        await asyncio.wait([self._loop])
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            chunks = self._scheduler.schedule(self._admit)
            if chunks:
                await self._run_pass(chunks)
            else:
                self._wake.clear()
                if not await within(REST_S, self._wake.wait()):
                    self._engine.forget_slots(self._pool.idle_slots)
                    await self._wake.wait()

    async def _run_pass(self, chunks: list[Chunk[Work]]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            first_tokens = await loop.run_in_executor(self._thread, self._engine.step, chunks, self._pool.moves())
        except SequenceError as error:
            self._fail(chunks[error.span], error)
            self._scheduler.abandon()
        except Exception as error:  # the engine's outermost loop: one bad pass must not end the node
            log.exception("a prefill pass failed")
            self._pool.forget()
            for chunk in chunks:
                self._fail(chunk, HackkvError(f"prefill failed: {type(error).__name__}: {error}"))
            self._scheduler.abandon()
        else:
            self._speed.ran([(chunk.start, chunk.count) for chunk in chunks], loop.time() - began)
            self._scheduler.commit()
            for first in first_tokens:
                self._answer(first.work, first)

    def _fail(self, chunk: Chunk[Work], error: HackkvError) -> None:
        self._scheduler.leave(chunk.prompt)
        self._answer(chunk.prompt.owner, error)

    def _answer(self, work: Work, answer: FirstToken | HackkvError) -> None:
        """Answer a prompt, unless it has left or has its answer."""
        first_token = self._first_tokens.get(work)
        if first_token is None or first_token.done():
            return
        if isinstance(answer, HackkvError):
            first_token.set_exception(answer)
        else:
            first_token.set_result(answer)
