"""The loop that runs steps, one after another, and beside them the copies of sequences that swap.

All of it belongs to the event loop's thread; the engine's and the swap thread touch only what they were given. The loop
outlives every failure of a step or a copy: it ends the sequences concerned and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from decode_node.engine import DecodeEngine, Sequence, Work
from decode_node.scheduler import DecodeScheduler, Footprint, Seat, Turn
from decode_node.stream import Stream
from decode_node.swap import HostKv, Swapper
from hackkv.codec import FP16_BYTES, Span
from hackkv.errors import HackkvError, NonFiniteError
from hackkv.model.runner import ModelRunner
from hackkv.pages import Grant
from hackkv.types import Decoded, Swapped, Token

log = logging.getLogger(__name__)


def footprint(runner: ModelRunner) -> Footprint:
    """What sequences weigh with this model and codec."""
    layout, codec = runner.layout, runner.codec
    heads = layout.num_layers * layout.num_kv_heads
    row_bytes = 2 * FP16_BYTES * layout.head_dim * heads
    return Footprint(codec.sealed_pages, layout.page_tokens, codec.format.resident_bytes * heads, row_bytes)


class Steps:
    """Runs what the scheduler plans. `close` ends it after the current step."""

    def __init__(self, runner: ModelRunner, scheduler: DecodeScheduler[Stream]) -> None:
        self._scheduler = scheduler
        self._footprint = scheduler.footprint
        self._engine = DecodeEngine(runner)
        # The thread is in inference mode for good: to enter it with each step costs Python time, as `bench.step` shows.
        infer = torch.inference_mode().__enter__
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-engine", initializer=infer)
        self._swapper = Swapper(runner.pools)
        self._copies: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loop = asyncio.create_task(self._run())
        self.counts: Counter[str] = Counter()
        """swap_out, swap_in, generated_tokens, replayed_tokens."""
        self.swapped_s = 0.0
        """Seconds that sequences were swapped out, in sum, of those that came back."""

    @property
    def failed(self) -> bool:
        """Whether the loop has ended without being told to: nothing will ever run again."""
        return self._loop.done() and not self._loop.cancelled()

    def join(self, stream: Stream, sequence: Sequence) -> None:
        """Its KV has landed: run it."""
        stream.sequence = sequence
        self._scheduler.land(stream.seat, len(sequence.pending))
        self._wake.set()

    def leave(self, stream: Stream) -> None:
        """It is over, finished or not; harmless when it is over already."""
        self._scheduler.leave(stream.seat)
        stream.kv = None
        self._wake.set()

    async def close(self) -> None:
        """Stop after the current step and copy."""
        self._loop.cancel()
        await asyncio.wait([self._loop, *self._copies])
        self._thread.shutdown(wait=True)
        self._swapper.close()

    async def _run(self) -> None:
        try:
            await self._run_steps()
        except Exception:  # a bug of the scheduler; `failed` tells, and the process ends
            log.exception("the decode loop failed")
            self._fail([seat.owner for seat in self._scheduler.seats], HackkvError("the decode loop failed"))
            raise

    async def _run_steps(self) -> None:
        chosen: list[tuple[Stream, Token]] = []
        while True:
            plan = self._scheduler.schedule()
            # What a copy needs is taken now: the sequence may leave before the copy's first moment.
            for seat in plan.leaving:
                self._start(self._swap_out(seat, _grant(seat)))
            for seat in plan.returning:
                self._start(self._swap_in(seat, _grant(seat), seat.owner.kv))
            step = self._begin(plan.turns) if plan.turns else None
            # The last step's tokens go out while this one computes: who decodes does not wait for those who read.
            for stream, token in chosen:
                _send(stream, token)
            if step is None:
                chosen = []
                self._wake.clear()
                await self._wake.wait()
            else:
                chosen = await self._end(step, plan.turns)

    # Steps ----------------------------------------------------------------------------------------------------------

    def _begin(self, turns: list[Turn[Stream]]) -> asyncio.Future[list[Token | None]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._engine.step, _work(turns))

    async def _end(
        self, step: asyncio.Future[list[Token | None]], turns: list[Turn[Stream]]
    ) -> list[tuple[Stream, Token]]:
        """Wait for the step; those that end with it leave. Returns the tokens to send."""
        advanced = False
        streams = [turn.seat.owner for turn in turns]
        try:
            tokens = await step
            advanced = True
        except NonFiniteError as error:
            self._fail([streams[error.span]], error)
        except Exception as error:  # the engine's outermost loop: one bad step must not end the node
            log.exception("a decode step failed")
            self._fail(streams, HackkvError(f"decode failed: {type(error).__name__}: {error}"))
        finally:
            self._scheduler.stepped(turns, advanced=advanced)
        if not advanced:
            return []
        chosen = [(stream, token) for stream, token in zip(streams, tokens, strict=True) if token is not None]
        self.counts["replayed_tokens"] += sum(turn.rows for turn in turns if turn.replay)
        self.counts["generated_tokens"] += len(chosen)
        for stream, token in chosen:
            if token.finish is not None:
                self.leave(stream)
        return chosen

    def _fail(self, streams: Iterable[Stream], error: HackkvError) -> None:
        for stream in streams:
            self.leave(stream)
            stream.put(error)

    # Copies ---------------------------------------------------------------------------------------------------------

    def _start(self, copy: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(copy)
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _swap_out(self, seat: Seat[Stream], grant: Grant) -> None:
        stream, tokens = seat.owner, seat.tokens
        stream.swapped_at = perf_counter()
        stream.put(Swapped())
        with self._moving(seat):
            pages, rows = self._footprint.sealed(tokens), self._footprint.rows(tokens)
            stream.kv = await self._swapper.out(grant, pages, rows)
            self.counts["swap_out"] += 1

    async def _swap_in(self, seat: Seat[Stream], grant: Grant, kv: HostKv | None) -> None:
        stream = seat.owner
        with self._moving(seat):
            assert kv is not None
            await self._swapper.back(grant, kv)
            stream.kv = None
            self.counts["swap_in"] += 1
            seconds = perf_counter() - stream.swapped_at
            stream.sequence.swapped_s += seconds
            self.swapped_s += seconds

    @contextlib.contextmanager
    def _moving(self, seat: Seat[Stream]) -> Iterator[None]:
        """Whatever becomes of the copy, the scheduler hears that it is over."""
        try:
            yield
        except Exception as error:  # no memory, say: it must not end the node
            log.exception("a swap failed")
            self._fail([seat.owner], HackkvError(f"swap failed: {type(error).__name__}: {error}"))
        finally:
            self._scheduler.copied(seat)
            self._wake.set()


def _send(stream: Stream, token: Token) -> None:
    stream.put(token)
    if token.finish is not None:
        stream.put(_decoded(stream.sequence))


def _work(turns: Iterable[Turn[Stream]]) -> list[Work]:
    return [Work(turn.seat.owner.sequence, _span(turn.seat, turn.rows), turn.replay) for turn in turns]


def _span(seat: Seat[Stream], rows: int) -> Span:
    grant = _grant(seat)
    return Span(grant.slot, seat.tokens, rows, grant.pages)


def _grant(seat: Seat[Stream]) -> Grant:
    assert seat.grant is not None, "who is planned for holds pages"
    return seat.grant


def _decoded(sequence: Sequence) -> Decoded:
    return Decoded(
        queue_s=sequence.queue_s,
        decode_s=sequence.decode_s,
        attend_s=sequence.attend_s,
        approximation_s=sequence.approximation_s,
        swapped_s=sequence.swapped_s,
    )
