"""What a prefill node answers: prompts in, first tokens and handoffs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from hackkv.codec import FP16_BYTES
from hackkv.errors import HackkvError, NodeDraining, NonFiniteError
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker
from hackkv.types import (
    HandoffEnd,
    KvFrame,
    NodeIdentity,
    NodeInfo,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Role,
)
from prefill_node.drain_rate import DrainRate
from prefill_node.engine import FirstToken, PrefillEngine, Work
from prefill_node.host_pages import HostPages
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.intake import Intake
from prefill_node.outbox import Outbox
from prefill_node.page_names import PageName, page_names
from prefill_node.prefix_pool import PrefixPool
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from prefill_node.shipment import DEFAULT_PATIENCE, Patience, Shipment
from transport.base import KvSender

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""Time for the last words of a drained node to leave it."""


class PrefillService:
    """Implements `PrefillNode` on one model and one engine thread. `close` ends it."""

    def __init__(
        self,
        identity: NodeIdentity,
        worker: Worker,
        sender: KvSender,
        *,
        num_pages: int,
        max_prompts: int,
        chunk_tokens: int,
        host_bytes: int,
        queue_tokens: int = 1 << 20,
        prefix_cache: bool = True,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._identity = identity
        self._worker = worker
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._drain_rate = DrainRate(self._loop.time)
        self._host = HostPool(host_bytes, self._left)
        # Where the last page's codes change with each token, a page's bytes depend on how its prompt was cut.
        self._reuse = prefix_cache and worker.codec.sealed_pages(1) == 0
        page_tokens = worker.layout.page_tokens
        page_bytes = worker.layout.num_layers * worker.layout.num_kv_heads * worker.codec.format.resident_bytes
        self._pool = PrefixPool(num_pages, max_prompts, page_tokens, self._host, page_bytes, reuse=self._reuse)
        self._scheduler: PrefillScheduler[Work] = PrefillScheduler(self._pool, chunk_tokens)
        self.outbox = Outbox(sender, worker.fingerprint, self._host, patience, self._kv_bytes)
        self._intake = Intake(
            worker.model.spec,
            self._host,
            self._drain_rate,
            page_pool_tokens=num_pages * page_tokens,
            queue_tokens=queue_tokens,
        )
        self._shipments: dict[Work, Shipment] = {}
        self._first_tokens: dict[Work, asyncio.Future[FirstToken]] = {}
        runner = ModelRunner(worker.model, worker.codec, num_pages, max_prompts)
        self._engine = PrefillEngine(runner, HostPages(runner.pools, self._pool.num_places), self._emit)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefill-engine")
        self._passes = asyncio.create_task(self._run_passes())

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt; see `PrefillNode`. Closing the iterator stops the work within one pass."""
        kv_bytes = self._kv_bytes(len(job.request.prompt_ids)) if job.handoff else 0
        self._intake.check(job, kv_bytes, self._scheduler.queued_tokens)
        work = Work(job, perf_counter())
        prompt = self._prompt(work)
        first_token = self._first_tokens[work] = self._loop.create_future()
        shipment: Shipment | None = None
        try:
            if job.handoff:
                shipment = self._shipments[work] = self.outbox.open(job)
            self._scheduler.add(prompt)
            self._wake.set()
            first = await first_token
            wanted = first.token.finish is None
            if shipment and not wanted:
                shipment.let_go()
            yield _prefilled(first, prompt.cached_tokens)
            if shipment and wanted:
                async for fate in shipment.fates():
                    yield fate
        finally:
            self._scheduler.leave(prompt)
            del self._first_tokens[work]
            if first_token.done() and not first_token.cancelled():
                first_token.exception()  # nobody may have asked for it
            self._ended.set()
            if shipment:
                del self._shipments[work]
                await self.outbox.close(shipment)

    async def assign(self, transfer_id: str, epoch: int, decode_address: str) -> None:
        """Name the decode node of a job, for the first time or again; see `PrefillNode`."""
        self.outbox.assign(transfer_id, epoch, decode_address)

    async def describe(self) -> NodeInfo:
        """Identity, capacity and load."""
        return NodeInfo(
            node_id=self._identity.node_id,
            role=Role.PREFILL,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            model=self._worker.name,
            fingerprint=self._worker.fingerprint,
            page_tokens=self._worker.layout.page_tokens,
            max_context=self._worker.model.spec.max_context,
            total_pages=self._pool.num_pages,
            free_pages=self._pool.free_pages,
            queued_tokens=self._scheduler.queued_tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            stats=self._stats(),
            draining=self.draining.is_set(),
            kernels=self._worker.kernels,
        )

    @property
    def draining(self) -> asyncio.Event:
        """Set for good when the node takes no job any more."""
        return self._intake.draining

    async def drain(self, within_s: float) -> None:
        """Take no job any more and finish those at hand: KV stays until a decode node has it.

        What is left after `within_s` ends with `NodeDraining`: another node has to go on.
        """
        self.draining.set()
        self.outbox.stop_keeping()
        if await self._idle(within_s):
            return
        error = NodeDraining("this prefill node stops")
        for first_token in self._first_tokens.values():
            if not first_token.done():
                first_token.set_exception(error)
        for shipment in self._shipments.values():
            shipment.let_go(error)
        await self._idle(LAST_WORDS_S)

    async def close(self) -> None:
        """Stop after the current pass."""
        self._passes.cancel()
        await asyncio.wait([self._passes])
        self._thread.shutdown(wait=True)

    def _prompt(self, work: Work) -> Prompt[Work]:
        request = work.job.request
        ids = request.prompt_ids
        names: tuple[PageName, ...] = ()
        if self._reuse:
            names = page_names(ids, self._pool.page_tokens, self._worker.fingerprint, request.cache_salt)
        # Who asks for the prompt's own log-probabilities needs every token computed.
        return Prompt(work, len(ids), names, hit=request.sampling.prompt_logprobs is None)

    def _stats(self) -> tuple[tuple[str, float], ...]:
        """Gauges and counters for the metrics page."""
        counts, (here, in_host) = self._pool.counts, self._pool.known_pages
        return (
            ("hackkv_host_pool_capacity_bytes", float(self._host.capacity_bytes)),
            ("hackkv_host_pool_bytes", float(self._host.capacity_bytes - self._host.free_bytes)),
            *((f"hackkv_host_pool_{tenant}_bytes", float(self._host.bytes_of(tenant))) for tenant in Tenant),
            ("hackkv_kept_dropped_total", float(self.outbox.dropped)),
            ("hackkv_resends_total", float(self.outbox.resends)),
            ("hackkv_prefix_queries_total", float(counts.queried_tokens)),
            ("hackkv_prefix_hits_total", float(counts.hit_tokens)),
            ("hackkv_prefix_evictions_total", float(counts.evicted_pages)),
            ("hackkv_prefix_pages", float(here)),
            ("hackkv_prefix_host_pages", float(in_host)),
            *((f"hackkv_assign_refused_{why}_total", float(count)) for why, count in self.outbox.refused.items()),
            *((f"hackkv_prefill_refused_{why}_total", float(count)) for why, count in self._intake.refused.items()),
        )

    async def _idle(self, within_s: float) -> bool:
        """Wait until no job is left; False if that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                while self._first_tokens:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _emit(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        """From the engine's thread to the event loop's."""
        self._loop.call_soon_threadsafe(self._put, work, item)

    def _put(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        if work not in self._shipments:
            return
        if isinstance(item, KvFrame):
            self._shipments[work].put(item)
        else:
            self._shipments[work].finish(item, work.finished_at)

    def _left(self, num_bytes: int) -> None:
        """KV ceased to wait in host memory: there may be room for the next prompt."""
        self._drain_rate.left(num_bytes)
        self._wake.set()

    def _kv_bytes(self, tokens: int) -> int:
        """Payload bytes of the KV of so many tokens."""
        layout, sealed = self._worker.layout, self._worker.codec.sealed_pages(tokens)
        open_rows = max(0, tokens - sealed * layout.page_tokens)
        open_bytes = 2 * FP16_BYTES * layout.head_dim * open_rows
        per_head = sealed * self._worker.codec.format.wire_bytes + open_bytes
        return layout.num_layers * layout.num_kv_heads * per_head

    def _admit(self, work: Work) -> bool:
        """Whether host memory has room for the KV of a prompt; it is claimed then."""
        shipment = self._shipments.get(work)
        return shipment is None or shipment.claim_room()

    async def _run_passes(self) -> None:
        while True:
            chunks = self._scheduler.schedule(self._admit)
            if not chunks:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._run_pass(chunks)

    async def _run_pass(self, chunks: list[Chunk[Work]]) -> None:
        try:
            first_tokens = await self._loop.run_in_executor(self._thread, self._engine.step, chunks, self._pool.moves())
        except NonFiniteError as error:
            self._fail(chunks[error.span], error)
            self._scheduler.abandon()
        except Exception as error:  # the engine's outermost loop: one bad pass must not end the node
            log.exception("a prefill pass failed")
            self._pool.forget()
            for chunk in chunks:
                self._fail(chunk, HackkvError(f"prefill failed: {type(error).__name__}: {error}"))
            self._scheduler.abandon()
        else:
            self._scheduler.commit()
            for first in first_tokens:
                if first.work in self._first_tokens and not self._first_tokens[first.work].done():
                    self._first_tokens[first.work].set_result(first)

    def _fail(self, chunk: Chunk[Work], error: HackkvError) -> None:
        work = chunk.prompt.owner
        self._scheduler.leave(chunk.prompt)
        if work in self._first_tokens and not self._first_tokens[work].done():
            self._first_tokens[work].set_exception(error)


def _prefilled(first: FirstToken, cached_tokens: int) -> Prefilled:
    work = first.work
    started = work.started_at if work.started_at is not None else work.finished_at
    return Prefilled(
        token=first.token,
        queue_s=started - work.queued_at,
        prefill_s=work.finished_at - started,
        quantize_s=work.quantize_s,
        computed_tokens=len(work.job.request.prompt_ids) - cached_tokens,
        prompt_logprobs=tuple(work.prompt_logprobs),
    )
