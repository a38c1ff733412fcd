"""Where handoffs land: into pages that nobody can see yet, frame by verified frame, then committed at once.

A reservation is made by the router's `decode` call and owned by it. When that call ends, for whatever reason, the
reservation is closed and its pages go back; a frame that comes later finds it closed and is refused. Whatever comes
late, twice, or from nobody we know is refused by name and counted, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter

import torch

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, HandshakeRefused, NodeLost, TransferError
from hackkv.framing import FrameLedger, fp16_bytes
from hackkv.model.runner import ModelRunner
from hackkv.pages import Grant
from hackkv.types import DecodeJob, Fingerprint, Handoff, HandoffEnd, KvFrame, Receipt


@dataclass(frozen=True, slots=True)
class Arrival:
    """A committed handoff."""

    receipt: Receipt
    first_token: int


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one request, waiting for its KV."""

    job: DecodeJob
    grant: Grant
    arrival: asyncio.Future[Arrival]
    receiving: bool = False


class Inbox:
    """Implements `Deliver` for a decode node. All methods belong to the event loop's thread."""

    def __init__(self, runner: ModelRunner, fingerprint: Fingerprint) -> None:
        self._runner = runner
        self._fingerprint = fingerprint
        self._reservations: dict[str, Reservation] = {}
        self.refused: Counter[str] = Counter()
        """Handoffs refused, by reason: one of `FrameRefused.reason`, or why the handshake failed."""
        self.received_tokens = 0

    def reserve(self, job: DecodeJob, grant: Grant) -> Reservation:
        """Expect the handoff of `job`; one of an earlier epoch fails with `TransferError`.

        Raises `HandshakeRefused` when the transfer id is in use in this epoch or a later one.
        """
        earlier = self._reservations.get(job.transfer_id)
        if earlier is not None:
            if earlier.job.epoch >= job.epoch:
                raise HandshakeRefused(f"transfer_id {job.transfer_id} is in use")
            self.fail(earlier, TransferError(f"transfer {job.transfer_id} has moved on to epoch {job.epoch}"))
        arrival: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        reservation = self._reservations[job.transfer_id] = Reservation(job, grant, arrival)
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Stop expecting it: nothing more is written to its pages. Once is enough."""
        if not reservation.arrival.cancel() and not reservation.arrival.cancelled():
            reservation.arrival.exception()  # takes note of an error that nobody will ask for any more
        if self._reservations.get(reservation.job.transfer_id) is reservation:
            del self._reservations[reservation.job.transfer_id]

    async def deliver(self, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Receive one handoff; see `transport.base.Deliver`."""
        reservation = self._admit(handoff)
        try:
            arrival = await self._receive(reservation, handoff, frames)
        except FrameRefused as error:
            self.refused[error.reason] += 1
            self.fail(reservation, error)
            raise
        except (NodeLost, DeadlineExceeded) as error:
            # Not this node is lost: whoever reads our stream must not think so.
            self.fail(reservation, TransferError(f"the prefill node: {error}"))
            raise
        except HackkvError as error:
            self.fail(reservation, error)
            raise
        except asyncio.CancelledError:
            self.fail(reservation, TransferError("the prefill node dropped the handoff"))
            raise
        except Exception as error:
            self.fail(reservation, TransferError(f"transfer {handoff.transfer_id} failed: {type(error).__name__}"))
            raise
        reservation.arrival.set_result(arrival)
        self.received_tokens += arrival.receipt.tokens
        return arrival.receipt

    def fail(self, reservation: Reservation, error: HackkvError) -> None:
        """Give up a reservation whose KV has not landed; without effect on one that has."""
        if not reservation.arrival.done():
            reservation.arrival.set_exception(error)

    def _admit(self, handoff: Handoff) -> Reservation:
        reservation = self._reservations.get(handoff.transfer_id)
        if reservation is None:
            raise self._refusal("unknown", f"transfer_id {handoff.transfer_id!r} is not expected here")
        if handoff.epoch != reservation.job.epoch:
            raise self._refusal("stale", f"epoch {handoff.epoch}, expected {reservation.job.epoch}")
        if reservation.receiving:
            raise self._refusal("duplicate", f"transfer_id {handoff.transfer_id!r} is being received already")
        reservation.receiving = True  # from here on this is the transfer that was expected, good or bad
        error = self._disagreement(reservation, handoff)
        if error is not None:
            self.fail(reservation, error)
            raise error
        return reservation

    def _disagreement(self, reservation: Reservation, handoff: Handoff) -> HandshakeRefused | None:
        field = self._fingerprint.mismatch(handoff.fingerprint)
        if field is not None:
            return self._refusal("fingerprint", f"fingerprints differ in {field}")
        prompt_tokens = len(reservation.job.request.prompt_ids)
        if handoff.num_tokens != prompt_tokens:
            return self._refusal("length", f"num_tokens {handoff.num_tokens}, expected {prompt_tokens}")
        return None

    def _refusal(self, reason: str, message: str) -> HandshakeRefused:
        self.refused[reason] += 1
        return HandshakeRefused(message)

    async def _receive(
        self, reservation: Reservation, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]
    ) -> Arrival:
        began = perf_counter()
        codec, layout = self._runner.codec, self._runner.layout
        sealed = codec.sealed_pages(handoff.num_tokens)
        ledger = FrameLedger(layout, codec.format, handoff.transfer_id, handoff.epoch, handoff.num_tokens, sealed)
        by_plane: Counter[str] = Counter()
        header_bytes = 0
        async for item in frames:
            if reservation.arrival.done():
                raise TransferError(f"transfer {handoff.transfer_id} was cancelled at the decode node")
            if isinstance(item, HandoffEnd):
                ledger.finish(item)
                first = item.first_token
                if not 0 <= first < self._runner.model.spec.vocab:
                    raise FrameRefused(f"first_token {first} is outside the vocabulary", "range")
                size = fp16_bytes(layout, handoff.num_tokens)
                planes = tuple(sorted(by_plane.items()))
                seconds = perf_counter() - began
                receipt = Receipt(handoff.transfer_id, handoff.num_tokens, planes, header_bytes, size, seconds)
                return Arrival(receipt, first)
            self._install(reservation.grant, item, ledger)
            header_bytes += item.header_bytes
            for span in item.planes:
                by_plane[span.name] += span.coded_bytes
        raise FrameRefused("the stream ended before its end frame", "truncated")

    def _install(self, grant: Grant, frame: KvFrame, ledger: FrameLedger) -> None:
        """Write one verified frame. It runs on the event loop, so `close` never finds a write half done."""
        planes = ledger.accept(frame)
        pool = self._runner.pools[frame.layer].heads(frame.head_start, frame.head_count)
        if frame.rows:
            pool.open_k[grant.slot, :, : frame.rows] = planes["open_k"][:, 0]
            pool.open_v[grant.slot, :, : frame.rows] = planes["open_v"][:, 0]
        else:
            pages = grant.pages[frame.page_start : frame.page_start + frame.page_count]
            self._runner.codec.from_wire(pool, torch.tensor(pages), planes)
