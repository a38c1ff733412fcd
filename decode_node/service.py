"""What a decode node answers: room reserved, KV landed, tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

from decode_node.engine import DecodeEngine, Sequence
from decode_node.inbox import Arrival, Inbox
from decode_node.scheduler import DecodeScheduler
from hackkv.errors import HackkvError, NonFiniteError, Overloaded, RequestError
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.model.worker import Worker
from hackkv.pages import Grant, PagePool
from hackkv.types import Decoded, DecodeEvent, DecodeJob, Landed, NodeIdentity, NodeInfo, Reserved, Role, Token

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stream:
    """A sequence and the queue through which its tokens leave; an error in the queue ends it."""

    sequence: Sequence
    tokens: asyncio.Queue[Token | HackkvError] = field(default_factory=asyncio.Queue)


class DecodeService:
    """Implements `DecodeNode` on one model and one engine thread. `close` ends it."""

    def __init__(
        self, identity: NodeIdentity, worker: Worker, *, num_pages: int, max_sequences: int, max_batch: int
    ) -> None:
        self._identity = identity
        self._worker = worker
        self._runner = ModelRunner(worker.model, worker.codec, num_pages, max_sequences)
        self.inbox = Inbox(self._runner, worker.fingerprint)
        self._pool = PagePool(num_pages, max_sequences)
        self._scheduler: DecodeScheduler[Stream] = DecodeScheduler(max_batch)
        self._engine = DecodeEngine(self._runner)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-engine")
        self._in_step: list[Stream] = []
        self._departed: list[Grant] = []
        self._reserved_tokens = 0
        self._wake = asyncio.Event()
        self._steps = asyncio.create_task(self._run_steps())

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request; see `DecodeNode`. Closing the iterator stops it within one step."""
        prompt_tokens = len(job.request.prompt_ids)
        tokens = prompt_tokens + job.request.sampling.max_tokens
        grant = self._reserve_pages(tokens)
        self._reserved_tokens += tokens
        reservation, stream = None, None
        try:
            reservation = self.inbox.reserve(job, grant)
            yield Reserved()
            arrival = await reservation.arrival
            yield Landed(arrival.receipt)
            stream = self._join(job, grant, arrival)
            finished = False
            while not finished:
                token = await stream.tokens.get()
                if isinstance(token, HackkvError):
                    raise token
                yield token
                finished = token.finish is not None
            yield _decoded(stream.sequence)
        finally:
            self._reserved_tokens -= tokens
            if reservation:
                self.inbox.close(reservation)
            self._release(grant, stream)

    async def describe(self) -> NodeInfo:
        """Identity, capacity and load."""
        refused = tuple((f"refused_{reason}", float(count)) for reason, count in sorted(self.inbox.refused.items()))
        return NodeInfo(
            node_id=self._identity.node_id,
            role=Role.DECODE,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            model=self._worker.name,
            fingerprint=self._worker.fingerprint,
            page_tokens=self._worker.layout.page_tokens,
            max_context=self._worker.model.spec.max_context,
            total_pages=self._pool.num_pages,
            free_pages=self._pool.free_pages,
            queued_tokens=self._reserved_tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            stats=(
                ("received_tokens", float(self.inbox.received_tokens)),
                ("refused_handoffs", float(self.inbox.refused.total())),
                *refused,
            ),
        )

    async def close(self) -> None:
        """Stop after the current step."""
        self._steps.cancel()
        await asyncio.wait([self._steps])
        self._thread.shutdown(wait=True)

    def _reserve_pages(self, tokens: int) -> Grant:
        if tokens > self._worker.model.spec.max_context:
            raise RequestError(f"{tokens} tokens exceed the model's {self._worker.model.spec.max_context}", "prompt")
        need = self._worker.layout.pages(tokens)
        if need > self._pool.num_pages:
            raise RequestError(f"{tokens} tokens need {need} pages; this node has {self._pool.num_pages}", "prompt")
        grant = self._pool.take(need)
        if grant is None:
            free, slots = self._pool.free_pages, self._pool.free_slots
            raise Overloaded(f"{need} pages and a slot are needed; {free} pages and {slots} slots are free")
        return grant

    def _join(self, job: DecodeJob, grant: Grant, arrival: Arrival) -> Stream:
        request = job.request
        eos_ids = self._worker.model.spec.eos_ids
        sampler = SamplerState(request.sampling, request.prompt_ids, eos_ids, emitted=(arrival.first_token,))
        sequence = Sequence(grant, len(request.prompt_ids), arrival.first_token, sampler, perf_counter())
        stream = Stream(sequence)
        self._scheduler.join(stream)
        self._wake.set()
        return stream

    def _release(self, grant: Grant, stream: Stream | None) -> None:
        """Give pages back; those that the current step still writes to, when it is over."""
        if stream is not None:
            self._scheduler.leave(stream)
            if stream in self._in_step:
                self._departed.append(grant)
                return
        self._pool.give_back(grant)

    async def _run_steps(self) -> None:
        while True:
            self._in_step = self._scheduler.schedule()
            if not self._in_step:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._run_step(self._in_step)

    async def _run_step(self, streams: list[Stream]) -> None:
        loop = asyncio.get_running_loop()
        try:
            batch = [stream.sequence for stream in streams]
            tokens = await loop.run_in_executor(self._thread, self._engine.step, batch)
        except NonFiniteError as error:
            self._fail([streams[error.span]], error)
        except Exception as error:  # the engine's outermost loop: one bad step must not end the node
            log.exception("a decode step failed")
            self._fail(streams, HackkvError(f"decode failed: {type(error).__name__}: {error}"))
        else:
            for stream, token in zip(streams, tokens, strict=True):
                stream.tokens.put_nowait(token)
                if token.finish is not None:
                    self._scheduler.leave(stream)
        finally:
            self._in_step = []
            departed, self._departed = self._departed, []
            for grant in departed:
                self._pool.give_back(grant)

    def _fail(self, streams: list[Stream], error: HackkvError) -> None:
        for stream in streams:
            self._scheduler.leave(stream)
            stream.tokens.put_nowait(error)


def _decoded(sequence: Sequence) -> Decoded:
    return Decoded(
        queue_s=sequence.started_at - sequence.joined_at,
        decode_s=sequence.stepped_at - sequence.started_at,
        attend_s=sequence.attend_s,
        approximation_s=sequence.approximation_s,
    )
