"""The service of a decode node: it reserves room, receives KV and generates tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from time import perf_counter
from typing import Final

from decode_node.config import DecodeSettings
from decode_node.engine import Sequence
from decode_node.inbox import CommittedHandoff, Inbox, Reservation
from decode_node.kept_rows import KeptRows
from decode_node.names import SequenceNames
from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from decode_node.steps import Steps
from decode_node.stream import Stream
from hackkv.codec import rows_held
from hackkv.errors import DeadlineExceeded, HackkvError, NodeDraining, Overloaded, RequestError, TransferError
from hackkv.guide import Guide
from hackkv.held import HeldKv
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.model.worker import Worker
from hackkv.nodes import NodeIdentity, NodeInfo
from hackkv.page_names import Naming, pack_marks
from hackkv.types import DecodeEvent, DecodeJob, Landed, Reserved, Role
from transport.base import Lend
from transport.closing import closing
from transport.wires import Listeners

FAREWELL_S = 5.0
"""Seconds that a drained node waits for its last events to be read."""

ROWS_DIVISOR: Final = 2
"""The divisor of the host memory for kept pages that gives the part for exact rows, if the codec needs them."""


class DecodeService:
    """Implements `DecodeNode` on one model and one engine thread. `close` ends it."""

    def __init__(
        self,
        identity: NodeIdentity,
        worker: Worker,
        num_pages: int,
        settings: DecodeSettings,
    ) -> None:
        """`num_pages` is the size of the page pool."""
        self._identity = identity
        self._worker = worker
        self._landing_s = settings.landing_s
        runner = ModelRunner(
            worker.model,
            worker.codec,
            num_pages,
            settings.max_sequences,
            prompts=False,
            recorded=settings.busiest(worker.model.device.type).recorded,
        )
        reuse, footprint = settings.prefix_cache and worker.codec.bytes_follow_tokens, runner.memory.footprint
        self._naming = Naming(footprint.page_tokens, worker.fingerprint) if reuse else None
        host_bytes = settings.prefix_host_bytes if reuse else 0
        row_bytes = footprint.earlier_bytes
        rows = KeptRows(host_bytes // ROWS_DIVISOR // row_bytes if row_bytes else 0)
        host_places = (host_bytes - rows.most * row_bytes) // footprint.page_bytes
        self.inbox = Inbox(runner, worker.fingerprint, rows)
        self.pool = PagePool(num_pages, settings.max_sequences, host_places)
        self._scheduler: DecodeScheduler[Stream] = DecodeScheduler(
            self.pool,
            footprint,
            SchedulerLimits(
                settings.host_bytes,
                settings.max_batch,
                settings.replay_tokens,
                replay_by_row=not worker.codec.decodes_as_prefill,
            ),
        )
        self._steps = Steps(runner, self._scheduler, rows)
        self._streams: set[Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._counts: Counter[str] = Counter()
        self.draining = asyncio.Event()
        """Set when the node accepts no new request."""

    async def record(self) -> None:
        """Let the device record decode steps if it can, before the first request. Raises `ConfigError`."""
        await self._steps.record()

    async def listen(self, listeners: Listeners, lend: Lend | None = None) -> None:
        """Receive handoffs and lend pages on every listener. From now on `describe` gives their addresses.

        The caller closes the listeners. `lend` replaces the inbox's own.
        """
        wires = await listeners.serve(self.inbox.deliver, lend or self.inbox.lend)
        self._identity = replace(self._identity, wires=wires)

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request; see `DecodeNode`. Closing the iterator stops the request within one step."""
        stream = self._admit(job)
        landing: asyncio.Task[None] | None = None
        try:
            assert stream.seat.grant is not None
            names = stream.names.prompt if stream.names else ()
            stream.reservation = self.inbox.reserve(job, stream.seat.grant, names, stream.loading, stream.held.exact)
            landing = asyncio.create_task(self._land(stream, stream.reservation))
            yield Reserved(stream.held)
            async with closing(stream.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._let_go(stream)
            # Everything that the stream holds is freed before the first await: a cancelled reader may get no further.
            self._streams.discard(stream)
            if not self._streams:
                self._idle.set()
            if landing is not None:
                landing.cancel()
                await asyncio.wait([landing])

    async def describe(self) -> NodeInfo:
        """Identity, capacity and load. Raises `HackkvError` when this node will never run a step again."""
        if self._steps.failed:
            raise HackkvError("the decode loop failed")
        return NodeInfo(
            node_id=self._identity.node_id,
            role=Role.DECODE,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            model=self._worker.name,
            fingerprint=self._worker.fingerprint,
            page_tokens=self._worker.layout.page_tokens,
            max_context=self._worker.model.spec.max_context,
            total_pages=self.pool.num_pages,
            free_pages=self.pool.free_pages,
            queued_tokens=self._scheduler.reserved_tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            stats=self._stats(),
            draining=self.draining.is_set(),
            kernels=self._worker.kernels,
            wires=self._identity.wires,
            loss=self._worker.loss,
            marks=None if self._naming is None else pack_marks(self.pool.kept.digests()),
        )

    async def drain(self, within_s: float) -> None:
        """Accept no new request and finish the present ones. After `within_s` seconds the rest ends with
        `NodeDraining`."""
        self.draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        for stream in [stream for stream in self._streams if not stream.over]:
            self._end(stream, self._refusal())
            self._counts["drained"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._idle.wait()

    async def close(self) -> None:
        """Stop after the current step and the frame that is landing."""
        await self._steps.close()
        self.inbox.end()

    # A request's way in ---------------------------------------------------------------------------------------------

    def _admit(self, job: DecodeJob) -> Stream:
        """Take room for a job. Raises `RequestError`, `Overloaded` or `NodeDraining`."""
        if self.draining.is_set():
            raise self._refusal()
        self._check(job)
        # The last token is chosen but never run, so it needs no room.
        prompt_tokens = len(job.request.prompt_ids)
        stream = Stream(job)
        if self._naming is not None:
            grows = self._worker.codec.decodes_as_prefill
            stream.names = SequenceNames(self._naming, job.request, grows=grows)
        names = stream.names.prompt if stream.names else ()
        try:
            rows = rows_held(self._worker.codec, prompt_tokens)
            stream.seat = self._scheduler.admit(stream, rows, rows + job.request.sampling.max_tokens - 1, names)
        except Overloaded:
            self._counts["overloaded"] += 1
            raise
        pages = stream.seat.held_grant.held
        exact = self._steps.copies.rows_after(names[pages - 1]) if pages else None
        stream.held = HeldKv(pages, pages if exact else 0)
        stream.loading = self._steps.copies.load(stream.seat, exact)
        self._streams.add(stream)
        self._idle.clear()
        return stream

    def _check(self, job: DecodeJob) -> None:
        spec, sampling = self._worker.model.spec, job.request.sampling
        tokens = len(job.request.prompt_ids) + sampling.max_tokens
        if tokens > spec.max_context:
            too_long = "prompt" if len(job.request.prompt_ids) >= spec.max_context else "max_tokens"
            raise RequestError(f"{tokens} tokens exceed the model's {spec.max_context}", too_long)
        if job.emitted and not (min(job.emitted) >= 0 and max(job.emitted) < spec.vocab):
            raise RequestError(f"emitted holds a token id outside 0..{spec.vocab - 1}", "emitted")
        chosen = max(1, len(job.emitted))  # token 0 comes with the KV
        if chosen >= sampling.max_tokens:
            raise RequestError(f"{chosen} of {sampling.max_tokens} tokens are chosen already", "max_tokens")

    async def _land(self, stream: Stream, reservation: Reservation) -> None:
        """Wait for the KV and join the batch. Runs as a task, so a slow reader does not hold up its reservation."""
        try:
            async with asyncio.timeout(self._landing_s):
                arrival = await reservation.arrival
            if stream.loading is not None:
                await asyncio.wait([stream.loading])
            self._check_replay(stream.job, arrival)
            emitted = stream.job.emitted or (arrival.first_token,)
            guide = await self._worker.guides.opened(stream.job.request.sampling.grammar, emitted)
        except TimeoutError:
            self._counts["landing_timeouts"] += 1
            self._end(stream, DeadlineExceeded(f"no KV landed within {self._landing_s:g} s"))
        except HackkvError as error:
            self._end(stream, error)
        else:
            self.inbox.close(reservation)
            stream.put(Landed(arrival.receipt))
            self._steps.join(stream, self._sequence(stream.job, emitted, guide))

    def _check_replay(self, job: DecodeJob, arrival: CommittedHandoff) -> None:
        if job.emitted and job.emitted[0] != arrival.first_token:
            self._counts["diverged"] += 1
            tokens = f"token 0 was {job.emitted[0]} and is {arrival.first_token} now"
            raise TransferError(f"the replay of transfer {job.transfer_id} has diverged: {tokens}")

    def _sequence(self, job: DecodeJob, emitted: tuple[int, ...], guide: Guide | None) -> Sequence:
        request = job.request
        model = self._worker.model
        sampler = SamplerState(request.sampling, request.prompt_ids, model.spec.eos_ids, emitted, model.kernels, guide)
        prompt_tokens = len(request.prompt_ids)
        evicted = prompt_tokens - rows_held(self._worker.codec, prompt_tokens)
        return Sequence(list(emitted), sampler, perf_counter(), evicted)

    def _end(self, stream: Stream, error: HackkvError) -> None:
        self._let_go(stream)
        stream.put(error)

    def _let_go(self, stream: Stream) -> None:
        """Free everything that a stream holds. Writes to its pages stop before the pages can get a new holder."""
        if stream.reservation is not None:
            self.inbox.close(stream.reservation)
        self._steps.leave(stream)

    def _refusal(self) -> NodeDraining:
        return NodeDraining(f"{self._identity.node_id} is about to stop")

    def _stats(self) -> tuple[tuple[str, float], ...]:
        """Gauges, and counters (`_total`), for the metrics page."""
        steps, inbox, kept, lent = self._steps, self.inbox, self.pool.kept, self.inbox.lender.counts
        (here, in_host), page_tokens = kept.known, self._worker.layout.page_tokens
        stats = {
            "hackkv_host_pool_bytes": self._scheduler.host_bytes,
            "hackkv_held_queries_total": kept.counts.queried_pages * page_tokens,
            "hackkv_held_hits_total": kept.counts.hit_pages * page_tokens,
            "hackkv_held_evictions_total": kept.counts.evicted_pages,
            "hackkv_held_pages": here,
            "hackkv_held_host_pages": in_host,
            "hackkv_held_exact_rows": len(self.inbox.lender.rows),
            "hackkv_lent_pages_total": lent.pages,
            "hackkv_lent_bytes_total": lent.payload_bytes,
            "hackkv_lends_refused_total": lent.refused,
            "hackkv_swapped_sequences": self._scheduler.swapped,
            "hackkv_swap_out_total": steps.copies.counts["swap_out"],
            "hackkv_swap_in_total": steps.copies.counts["swap_in"],
            "hackkv_swapped_seconds_total": steps.copies.swapped_s,
            "hackkv_generated_tokens_total": steps.counts["generated_tokens"],
            "hackkv_replayed_tokens_total": steps.counts["replayed_tokens"],
            "hackkv_replays_diverged_total": self._counts["diverged"],
            "hackkv_landing_timeouts_total": self._counts["landing_timeouts"],
            "hackkv_drained_total": self._counts["drained"],
            "hackkv_admission_refused_total": self._counts["overloaded"],
            "hackkv_received_tokens_total": inbox.received_tokens,
            "hackkv_handoffs_refused_total": inbox.refused.total(),
        }
        refused = {f"hackkv_handoffs_refused_{reason}_total": count for reason, count in sorted(inbox.refused.items())}
        return tuple((name, float(value)) for name, value in {**stats, **refused}.items())
