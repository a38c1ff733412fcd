"""The service of a prefill node: it takes prompts, answers with first tokens and hands KV to decode nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import perf_counter

from hackkv.codec import rows_held
from hackkv.errors import NodeDraining
from hackkv.expected import expected_of
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.kv_memory import HostPages
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker
from hackkv.nodes import NodeIdentity, NodeInfo
from hackkv.page_names import Naming, PageName, pack_marks
from hackkv.types import HandoffEnd, KvFrame, Prefilled, PrefillEvent, PrefillJob, Role
from prefill_node.config import PrefillSettings
from prefill_node.drain_rate import DrainRate
from prefill_node.engine import PrefillEngine
from prefill_node.fetches import Fetches, PlannedFetch
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.intake import Intake
from prefill_node.links import Links
from prefill_node.outbox import ShipmentOutbox
from prefill_node.passes import Passes
from prefill_node.prefix_pool import PrefixPool, SharedPage
from prefill_node.resume_points import ResumePoints
from prefill_node.scheduler import PrefillScheduler, Prompt
from prefill_node.shipment import FrameKind, Patience, Shipment
from prefill_node.work import FirstToken, Work
from transport.base import KvSender

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""Seconds that a drained node waits for its last events to be read."""


class PrefillService:
    """Implements `PrefillNode` on one model and one engine thread. `close` ends it."""

    def __init__(
        self,
        identity: NodeIdentity,
        worker: Worker,
        sender: KvSender,
        num_pages: int,
        settings: PrefillSettings,
    ) -> None:
        """`num_pages` is the size of the page pool."""
        self._identity = identity
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._host = HostPool(settings.host_bytes, self._left)
        reuse = settings.prefix_cache and worker.codec.bytes_follow_tokens
        prompts = settings.max_prompts
        resumes = reuse and worker.codec.window.pages > 1
        kept = range(prompts, prompts + settings.resume_points) if resumes else range(0)
        runner = ModelRunner(worker.model, worker.codec, num_pages, prompts + len(kept))
        page_tokens, page_bytes = worker.footprint.page_tokens, worker.footprint.page_bytes
        points = ResumePoints[SharedPage](kept) if kept else None
        self._pool = PrefixPool(num_pages, prompts, page_tokens, self._host, page_bytes, reuse=reuse, points=points)
        starts_over = worker.codec.window.recent > 0
        self._scheduler: PrefillScheduler[Work] = PrefillScheduler(
            self._pool, settings.chunk_tokens_on(worker.model.device.type), starts_over=starts_over
        )
        patience = Patience(settings.unassigned_s, settings.kept_s)
        links = Links(sender, worker.codec.wire_form, worker.codec.codes_where_it_pays, self._loop.time)
        self._naming = Naming(page_tokens, worker.fingerprint)
        kind = FrameKind(
            worker.fingerprint, expected_of(worker.codec, worker.layout, 0, worker.codec.wire_form, NOTHING_HELD)
        )
        self.outbox = ShipmentOutbox(links, kind, self._host, patience, self._kv_bytes)
        self._intake = Intake(
            worker.model.spec,
            self._host,
            DrainRate(self._loop.time),
            page_tokens=page_tokens,
            num_pages=num_pages,
            queue_tokens=settings.queue_tokens,
        )
        self._shipments: dict[Work, Shipment] = {}
        host_pages = HostPages(runner.memory, self._pool.places.count)
        engine = PrefillEngine(runner, host_pages, self._emit, settings.frame_bytes)
        self._fetches = Fetches(worker, sender, links, self._host, settings)
        self._passes = Passes(engine, self._scheduler, self._pool, self._admit, self._fetches.passes)

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt; see `PrefillNode`. Closing the iterator stops the work within one pass."""
        kv_bytes = self._kv_bytes(job) if job.handoff else 0
        self._intake.check(job, kv_bytes, self._queued_tokens)
        arrived = perf_counter()
        guide = await self._worker.guides.opened(job.request.sampling.grammar)
        work = Work(job, arrived, self.outbox.links.form(job.decode_address), guide)
        prompt = self._prompt(work)
        shipment: Shipment | None = None
        if job.handoff:
            shipment = self._shipments[work] = self.outbox.open(job)
        first_token = self._passes.expect(prompt)
        ask, fetching = self._worth_fetching(prompt), None
        if ask is None:
            self._passes.join(prompt)
        else:
            fetching = asyncio.create_task(self._fetch_and_join(ask, prompt, first_token))
        try:
            first = await first_token
            wanted = first.token.finish is None
            if shipment and not wanted:
                shipment.let_go()
            yield _prefilled(first, prompt.cached_tokens, ask)
            if shipment and wanted:
                async for fate in shipment.fates():
                    yield fate
        finally:
            if fetching is not None:
                fetching.cancel()
            self._passes.leave(prompt)
            if shipment:
                del self._shipments[work]
                await self.outbox.close(shipment)
            if fetching is not None:
                await asyncio.wait([fetching])

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a job, for the first time or again; see `PrefillNode`."""
        self.outbox.assign(transfer_id, epoch, decode_address, held)

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
            queued_tokens=self._queued_tokens,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            stats=self._stats(),
            draining=self.draining.is_set(),
            kernels=self._worker.kernels,
            wires=self._identity.wires,
            loss=self._worker.loss,
            marks=pack_marks(self._pool.digests()) if self._pool.reuse else None,
        )

    @property
    def draining(self) -> asyncio.Event:
        """Set when the node accepts no new job, and never cleared."""
        return self._intake.draining

    async def drain(self, within_s: float) -> None:
        """Accept no new job and finish those under way. KV stays until a decode node has it.

        Jobs that are left after `within_s` seconds end with `NodeDraining`: another node has to go on.
        """
        self.draining.set()
        self.outbox.stop_keeping()
        if await self._idle(within_s):
            return
        error = NodeDraining("this prefill node stops")
        self._passes.fail_all(error)
        for shipment in self._shipments.values():
            shipment.let_go(error)
        await self._idle(LAST_WORDS_S)

    async def close(self) -> None:
        """Stop after the current pass."""
        await self._passes.close()

    def _prompt(self, work: Work) -> Prompt[Work]:
        request = work.job.request
        ids = request.prompt_ids
        names: tuple[PageName, ...] = ()
        if self._pool.reuse:
            names = self._naming.names(ids, request.cache_salt)
        # Log-probabilities of the prompt's own tokens need every token computed, so such a prompt shares no page.
        return Prompt(work, len(ids), names, hit=request.sampling.prompt_logprobs is None)

    def _worth_fetching(self, prompt: Prompt[Work]) -> PlannedFetch | None:
        if not (prompt.hit and prompt.names):
            return None
        known, shared, _ = self._pool.beginning(prompt.names[: self._pool.pages_for(prompt.num_tokens) - 1])
        return self._fetches.wanted(prompt.owner.job, len(known), len(shared))

    async def _fetch_and_join(
        self, ask: PlannedFetch, prompt: Prompt[Work], first_token: asyncio.Future[FirstToken]
    ) -> None:
        """Fetch, queue the prompt, and keep the fetched pages until the prompt is complete."""
        fetched, places = ask.fetched, self._pool.places
        name = prompt.names[fetched.end - 1]
        try:
            await self._fetches.run(ask)
            places.offer(name, fetched)
            self._passes.join(prompt)
            await asyncio.wait([first_token])
        finally:
            places.withdraw(name, fetched)
            fetched.release()

    @property
    def _queued_tokens(self) -> int:
        return self._scheduler.queued_tokens + self._fetches.queued_tokens

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
            *self._fetches.stats(),
            *((f"hackkv_assign_refused_{why}_total", float(count)) for why, count in self.outbox.refused.items()),
            *((f"hackkv_prefill_refused_{why}_total", float(count)) for why, count in self._intake.refused.items()),
        )

    async def _idle(self, within_s: float) -> bool:
        """Wait until no job is left; False if that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                await self._passes.until_idle()
        except TimeoutError:
            return False
        return True

    def _emit(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        """Pass an item from the engine's thread to the event loop."""
        self._loop.call_soon_threadsafe(self._put, work, item)

    def _put(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        if work not in self._shipments:
            return
        if isinstance(item, KvFrame):
            self._shipments[work].kv.put(item)
        else:
            self._shipments[work].finish(item, work.finished_at)

    def _left(self, num_bytes: int) -> None:
        """Note that `num_bytes` of KV no longer wait in host memory: there may be room for the next prompt."""
        self._intake.drain_rate.left(num_bytes)
        self._passes.wake()

    def _kv_bytes(self, job: PrefillJob) -> int:
        """The most payload bytes of the KV that a job's decode node lacks: the size if coding saves nothing."""
        rows = rows_held(self._worker.codec, len(job.request.prompt_ids))
        return self._worker.footprint.wire_bytes(rows, job.held)

    def _admit(self, work: Work) -> bool:
        """Claim host memory for the KV of a prompt; False if there is no room. A job without a handoff needs none."""
        shipment = self._shipments.get(work)
        return shipment is None or shipment.kv.claim_room()


def _prefilled(first: FirstToken, cached_tokens: int, ask: PlannedFetch | None) -> Prefilled:
    work = first.work
    started = work.started_at if work.started_at is not None else work.finished_at
    return Prefilled(
        token=first.token,
        queue_s=started - work.queued_at,
        prefill_s=work.finished_at - started,
        quantize_s=work.quantize_s,
        computed_tokens=len(work.job.request.prompt_ids) - cached_tokens,
        prompt_logprobs=work.prompt_logprobs,
        wire_encode_s=work.wire_encode_s,
        fetched_tokens=ask.spared_tokens if ask is not None and ask.fetched.used else 0,
        fetched_bytes=ask.fetched.received_bytes if ask is not None else 0,
        fetch_s=ask.fetched.seconds if ask is not None else 0.0,
    )
