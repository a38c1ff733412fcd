"""What a prefill node answers: prompts in, first tokens and handoffs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from hackkv.errors import HackkvError, NonFiniteError, RequestError
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker
from hackkv.pages import PagePool
from hackkv.types import (
    HandedOff,
    HandoffEnd,
    KvFrame,
    NodeIdentity,
    NodeInfo,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Receipt,
    Role,
)
from prefill_node.engine import FirstToken, PrefillEngine, Work
from prefill_node.outbox import Outbox, Shipment
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from transport.base import KvSender

log = logging.getLogger(__name__)


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
        outbox_bytes: int,
    ) -> None:
        self._identity = identity
        self._worker = worker
        self._pool = PagePool(num_pages, max_prompts)
        self._scheduler: PrefillScheduler[Work] = PrefillScheduler(self._pool, worker.layout.page_tokens, chunk_tokens)
        self._wake = asyncio.Event()
        self.outbox = Outbox(sender, worker.fingerprint, outbox_bytes, self._wake.set)
        self._shipments: dict[Work, Shipment] = {}
        self._first_tokens: dict[Work, asyncio.Future[FirstToken]] = {}
        runner = ModelRunner(worker.model, worker.codec, num_pages, max_prompts)
        self._engine = PrefillEngine(runner, self._emit)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefill-engine")
        self._loop = asyncio.get_running_loop()
        self._passes = asyncio.create_task(self._run_passes())

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt; see `PrefillNode`. Closing the iterator stops the work within one pass."""
        self._check(job)
        work = Work(job, perf_counter())
        prompt = Prompt(work, len(job.request.prompt_ids))
        first_token = self._first_tokens[work] = self._loop.create_future()
        delivery: asyncio.Task[Receipt] | None = None
        shipment: Shipment | None = None
        try:
            if job.handoff:
                shipment = self._shipments[work] = self.outbox.open(job)
                delivery = asyncio.create_task(shipment.deliver())
            self._scheduler.add(prompt)
            self._wake.set()
            # A handoff that fails while the prompt still runs ends the job at once.
            waits = {first_token, delivery} if delivery else {first_token}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if delivery and delivery.done() and not first_token.done():
                delivery.result()
            first = await first_token
            overlapped = shipment.sent_bytes if shipment else 0
            yield _prefilled(first)
            if shipment and delivery and first.token.finish is None:
                yield await _handed_off(shipment, delivery, first, overlapped)
        finally:
            self._scheduler.leave(prompt)
            del self._first_tokens[work]
            self._shipments.pop(work, None)
            await _drop(first_token, delivery)

    async def assign(self, transfer_id: str, epoch: int, decode_address: str) -> None:
        """Name the decode node of a job that was sent without one."""
        self.outbox.find(transfer_id, epoch).assign(decode_address)

    async def describe(self) -> NodeInfo:
        """Identity, capacity and load."""
        stats = (("hackkv_outbox_bytes", float(self.outbox.held_bytes)),)
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
            stats=stats,
        )

    async def close(self) -> None:
        """Stop after the current pass."""
        self._passes.cancel()
        await asyncio.wait([self._passes])
        self._thread.shutdown(wait=True)

    def _check(self, job: PrefillJob) -> None:
        ids, spec = job.request.prompt_ids, self._worker.model.spec
        total = len(ids) + job.request.sampling.max_tokens
        if not ids:
            raise RequestError("the prompt is empty", "prompt")
        if min(ids) < 0 or max(ids) >= spec.vocab:
            raise RequestError(f"the prompt holds a token id outside 0..{spec.vocab - 1}", "prompt")
        if total > spec.max_context:
            raise RequestError(f"prompt and output need {total} tokens; the model allows {spec.max_context}", "prompt")
        if not self._scheduler.fits(len(ids)):
            raise RequestError(f"a prompt of {len(ids)} tokens exceeds this node's page pool", "prompt")

    def _emit(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        """From the engine's thread to the event loop's."""
        self._loop.call_soon_threadsafe(self._put, work, item)

    def _put(self, work: Work, item: KvFrame | HandoffEnd) -> None:
        if work in self._shipments:
            self._shipments[work].put(item)

    async def _run_passes(self) -> None:
        while True:
            chunks = self._scheduler.schedule(admit=self.outbox.has_room)
            if not chunks:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._run_pass(chunks)

    async def _run_pass(self, chunks: list[Chunk[Work]]) -> None:
        try:
            first_tokens = await self._loop.run_in_executor(self._thread, self._engine.step, chunks)
        except NonFiniteError as error:
            self._fail(chunks[error.span], error)
            self._scheduler.abandon()
        except Exception as error:  # the engine's outermost loop: one bad pass must not end the node
            log.exception("a prefill pass failed")
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


async def _drop(*futures: asyncio.Future[Any] | None) -> None:
    """Cancel what still runs, wait for it, and take note of errors that nobody will ask for any more."""
    left = [future for future in futures if future is not None]
    for future in left:
        future.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _prefilled(first: FirstToken) -> Prefilled:
    work = first.work
    started = work.started_at if work.started_at is not None else first.finished_at
    return Prefilled(
        token=first.token,
        queue_s=started - work.queued_at,
        prefill_s=first.finished_at - started,
        quantize_s=work.quantize_s,
        computed_tokens=len(work.job.request.prompt_ids),
        prompt_logprobs=tuple(work.prompt_logprobs),
    )


async def _handed_off(
    shipment: Shipment, delivery: asyncio.Task[Receipt], first: FirstToken, overlapped_bytes: int
) -> HandedOff:
    receipt = await delivery
    done = perf_counter()
    exposed_from = max(first.finished_at, shipment.assigned_at or first.finished_at)
    return HandedOff(receipt, exposed_from - first.finished_at, done - exposed_from, overlapped_bytes)
