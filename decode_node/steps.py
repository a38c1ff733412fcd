"""The loop of a decode node on one page: plan, copy, step, send, again.

Everything here belongs to the event loop's thread. The threads of the engine and the swapper touch only their
arguments. When a step or a copy fails, the loop ends the sequences concerned and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from decode_node.copies import Copies
from decode_node.engine import DecodeEngine, Outcome, Sequence, StepPart
from decode_node.kept_rows import KeptRows
from decode_node.scheduler import DecodeScheduler
from decode_node.seats import Place, Plan, StepShare, publish
from decode_node.stream import Stream
from hackkv.batch import Span
from hackkv.errors import HackkvError, NonFiniteError, SequenceError
from hackkv.heap import REST_S, within
from hackkv.model.runner import ModelRunner
from hackkv.types import Decoded, Token

log = logging.getLogger(__name__)


class Steps:
    """Runs the scheduler's plans. `close` ends the loop after the current step."""

    def __init__(self, runner: ModelRunner, scheduler: DecodeScheduler[Stream], rows: KeptRows) -> None:
        self._scheduler = scheduler
        self._engine, self._memory = DecodeEngine(runner), runner.memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-engine")
        self._wake = asyncio.Event()
        self.copies = Copies(runner.memory, scheduler, self._fail, self._wake.set, rows)
        self._loop = asyncio.create_task(self._run())
        self.counts: Counter[str] = Counter()
        """generated_tokens, replayed_tokens."""

    @property
    def failed(self) -> bool:
        """Whether the loop ended without being told to. No step will run again."""
        return self._loop.done() and not self._loop.cancelled()

    async def record(self) -> None:
        """Let the device record steps, on the thread that will run them."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.record)

    def join(self, stream: Stream, sequence: Sequence) -> None:
        """Run a sequence whose KV has landed. Its prompt's pages may be shared from now on."""
        stream.sequence = sequence
        if stream.names is not None:
            publish(self._scheduler.pool, stream.seat, stream.names.prompt)
            stream.names.chosen(sequence.pending)
        self._scheduler.land(stream.seat, len(sequence.pending))
        self._wake.set()

    def leave(self, stream: Stream) -> None:
        """End a stream, finished or not. A repeat has no effect."""
        if stream.reservation is not None:
            stream.reservation.grant.close()  # no write to or read of its pages once they have another holder
        if stream.seat.place is Place.DEVICE and not stream.seat.busy:
            self.copies.keep_rows(stream)
        self._scheduler.leave(stream.seat)
        stream.kv = None
        self._wake.set()

    async def close(self) -> None:
        """Stop after the current step and copy."""
        self._loop.cancel()
        await asyncio.wait([self._loop])
        await self.copies.close()
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        try:
            await self._run_steps()
        except Exception:  # a bug of the scheduler; `failed` becomes True, and the process ends
            log.exception("the decode loop failed")
            self._fail_all([seat.owner for seat in self._scheduler.seats], HackkvError("the decode loop failed"))
            raise

    async def _run_steps(self) -> None:
        chosen: list[tuple[Stream, Token]] = []
        while True:
            plan = self._scheduler.schedule()
            self.copies.start(plan)
            self.copies.save_idle()
            step = self._begin(plan)
            # The last step's tokens go out while this step computes, so the engine does not wait for readers.
            for stream, token in chosen:
                _send(stream, token)
            if step is None:
                chosen = []
                self._engine.forget()
                self._wake.clear()
                if not await within(REST_S, self._wake.wait()):
                    self._memory.forget_slots(self._scheduler.pool.idle_slots)
                    await self._wake.wait()
            else:
                chosen = await self._end(step, plan.shares)

    def _begin(self, plan: Plan[Stream]) -> asyncio.Future[list[Outcome]] | None:
        """Start the step on the engine's thread; None if the plan has no step."""
        if not plan.shares:
            return None
        return asyncio.get_running_loop().run_in_executor(self._thread, self._engine.step, _parts(plan.shares))

    async def _end(
        self, step: asyncio.Future[list[Outcome]], shares: list[StepShare[Stream]]
    ) -> list[tuple[Stream, Token]]:
        """Wait for the step. Sequences that end with it leave. Returns the tokens to send."""
        advanced = False
        streams = [share.seat.owner for share in shares]
        try:
            outcomes = await step
            advanced = True
            for share, outcome in zip(shares, outcomes, strict=True):
                if isinstance(outcome, NonFiniteError):
                    self._fail(share.seat.owner, outcome)
                elif share.seat.place is Place.GONE and not share.replay:
                    self.copies.keep_rows(share.seat.owner)
        except SequenceError as error:
            self._fail(streams[error.span], error)
        except Exception as error:  # the engine's outermost loop: one bad step must not end the node
            log.exception("a decode step failed")
            self._scheduler.pool.forget()
            self.copies.forget_rows()
            self._fail_all(streams, HackkvError(f"decode failed: {type(error).__name__}: {error}"))
        finally:
            self._scheduler.stepped(shares, advanced=advanced)
        if not advanced:
            return []
        chosen = [(stream, token) for stream, token in zip(streams, outcomes, strict=True) if isinstance(token, Token)]
        self.counts["replayed_tokens"] += sum(share.rows for share in shares if share.replay)
        self.counts["generated_tokens"] += len(chosen)
        for stream, token in chosen:
            if stream.names is not None:
                stream.names.chosen([token.token_id])
        self._publish(
            share for share, outcome in zip(shares, outcomes, strict=True) if not isinstance(outcome, NonFiniteError)
        )
        for stream, token in chosen:
            if token.finish is not None:
                self.leave(stream)
        return chosen

    def _publish(self, shares: Iterable[StepShare[Stream]]) -> None:
        """Name the pages that a step has sealed, so that they are kept after their sequences end."""
        page_tokens = self._scheduler.footprint.page_tokens
        for seat, rows, _ in shares:
            names = seat.owner.names
            if names is not None and seat.rows % page_tokens < rows:
                publish(self._scheduler.pool, seat, names.of(seat.rows))

    def _fail_all(self, streams: Iterable[Stream], error: HackkvError) -> None:
        for stream in streams:
            self._fail(stream, error)

    def _fail(self, stream: Stream, error: HackkvError) -> None:
        self.leave(stream)
        stream.put(error)


def _send(stream: Stream, token: Token) -> None:
    stream.put(token)
    if token.finish is not None:
        stream.put(_decoded(stream.sequence))


def _parts(shares: Iterable[StepShare[Stream]]) -> list[StepPart]:
    return [StepPart(share.seat.owner.sequence, _span(share), share.replay) for share in shares]


def _span(share: StepShare[Stream]) -> Span:
    seat, grant = share.seat, share.seat.held_grant
    return Span(grant.slot, seat.rows, share.rows, grant.pages, seat.owner.sequence.evicted)


def _decoded(sequence: Sequence) -> Decoded:
    return Decoded(
        queue_s=sequence.queue_s,
        decode_s=sequence.decode_s,
        attend_s=sequence.attend_s,
        approximation_s=sequence.approximation_s,
        swapped_s=sequence.swapped_s,
    )
