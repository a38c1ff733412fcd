"""Receives handoffs, and lends pages (`lending.py`).

Each frame is verified and written to pages that no step reads yet. The end of the handoff commits them all.

The router's `decode` call makes a reservation. When that call ends, for whatever reason, the reservation is closed and
its pages go back. A frame that comes later is refused. A handoff that is late, repeated or unexpected is refused with a
named error, is counted, and changes nothing.

Headers are checked on the event loop. The bytes of large frames land on a thread beside it (`landing.py`). The next
frame is asked for when the previous one has landed: reading slowly is the back-pressure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from decode_node.kept_rows import KeptRows
from decode_node.landing import LandingGrant, LandingStrip
from decode_node.lending import Lender
from decode_node.pages import Grant
from hackkv.codec import rows_held
from hackkv.codec_footprint import fp16_bytes
from hackkv.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameRefused,
    HackkvError,
    HandshakeRefused,
    NodeLost,
    TransferError,
)
from hackkv.expected import Expected, expected_of
from hackkv.held import HeldKv
from hackkv.ledger import FrameLedger
from hackkv.model.runner import ModelRunner
from hackkv.page_names import PageName
from hackkv.types import DecodeJob, Fingerprint, Handoff, HandoffEnd, KvFrame, Receipt
from hackkv.wire_form import wire_form
from transport.closing import closing


@dataclass(frozen=True, slots=True)
class CommittedHandoff:
    """The result of a committed handoff."""

    receipt: Receipt
    first_token: int


@dataclass(slots=True, eq=False)
class Reservation:
    """The grant of one request that waits for its KV."""

    job: DecodeJob
    grant: LandingGrant
    arrival: asyncio.Future[CommittedHandoff]
    receiving: bool = False
    names: Sequence[PageName] = ()
    """The names of the prompt's full pages."""
    loading: asyncio.Task[bool] | None = None
    """Brings held pages back from host memory; False if that failed."""
    lending: bool = False


class Inbox:
    """Implements `Deliver` and `Lend`. All methods belong to the event loop's thread. `end` ends its thread."""

    def __init__(self, runner: ModelRunner, fingerprint: Fingerprint, rows: KeptRows | None = None) -> None:
        """`rows`: exact rows that may be lent with pages."""
        self._runner = runner
        self._fingerprint = fingerprint
        self._strip = LandingStrip(runner.memory)
        self.lender = Lender(runner, self._strip, KeptRows(0) if rows is None else rows)
        self._reservations: dict[str, Reservation] = {}
        self.refused: Counter[str] = Counter()
        """Handoffs refused, by reason: that of `FrameRefused`, or that of a failed handshake."""
        self.received_tokens = 0

    def reserve(
        self,
        job: DecodeJob,
        grant: Grant,
        names: Sequence[PageName] = (),
        loading: asyncio.Task[bool] | None = None,
        exact: int = 0,
    ) -> Reservation:
        """Expect the handoff of `job`. A reservation of an earlier epoch fails with `TransferError`.

        Pages that the grant holds may be lent when `loading` is over, which also brings the exact rows of the first
        `exact` pages. Raises `HandshakeRefused` when the transfer id is in use in this epoch or a later one.
        """
        earlier = self._reservations.get(job.transfer_id)
        if earlier is not None:
            if earlier.job.epoch >= job.epoch:
                raise HandshakeRefused(f"transfer_id {job.transfer_id} is in use")
            self.fail(earlier, TransferError(f"transfer {job.transfer_id} has moved on to epoch {job.epoch}"))
        arrival: asyncio.Future[CommittedHandoff] = asyncio.get_running_loop().create_future()
        landing = LandingGrant(grant, rows_held(self._runner.codec, len(job.request.prompt_ids)), exact)
        reservation = self._reservations[job.transfer_id] = Reservation(
            job, landing, arrival, names=names, loading=loading
        )
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Stop expecting a handoff. Nothing is written to its pages after this, not even by a frame that is landing.

        Waits for the write of one frame, if one is under way. A repeat has no effect.
        """
        reservation.grant.close()
        if not reservation.arrival.cancel() and not reservation.arrival.cancelled():
            reservation.arrival.exception()  # marks an error as retrieved, so that asyncio does not report it
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
            # The prefill node is lost, not this one: the router must not read `NodeLost` from this node's stream.
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
        self.received_tokens += arrival.receipt.tokens - arrival.receipt.held_tokens
        return arrival.receipt

    async def lend(self, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Lend pages that a reservation holds; see `transport.base.Lend`."""
        reservation = self._reservations.get(handoff.transfer_id)
        try:
            if reservation is None or reservation.job.epoch != handoff.epoch or reservation.lending:
                raise HandshakeRefused(f"pages of {handoff.transfer_id!r} are not to be lent now")
            flaw = self._unlike(handoff.fingerprint)
            if flaw is not None:
                raise HandshakeRefused(flaw)
            rows = self.lender.check(handoff, reservation.names[: reservation.grant.held.held])
        except HandshakeRefused:
            self.lender.counts.refused += 1
            raise
        reservation.lending = True
        try:
            if reservation.loading is not None:
                await asyncio.wait([reservation.loading])
                if not reservation.loading.result():
                    raise TransferError(f"pages of {handoff.transfer_id!r} are lost")
            async with closing(self.lender.frames(handoff, reservation.grant, rows)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            reservation.lending = False

    def end(self) -> None:
        """Wait until the frame that is landing has landed."""
        self._strip.close()

    def fail(self, reservation: Reservation, error: HackkvError) -> None:
        """Give up a reservation whose KV has not landed. Does nothing if it has."""
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
        reservation.receiving = True  # from here on a flaw of the handoff fails the reservation
        error = self._disagreement(reservation, handoff)
        if error is not None:
            self.fail(reservation, error)
            raise error
        return reservation

    def _disagreement(self, reservation: Reservation, handoff: Handoff) -> HandshakeRefused | None:
        flaw = self._unlike(handoff.fingerprint)
        if flaw is not None:
            return self._refusal("fingerprint", flaw)
        prompt_tokens = len(reservation.job.request.prompt_ids)
        if handoff.num_tokens != prompt_tokens:
            return self._refusal("length", f"num_tokens {handoff.num_tokens}, expected {prompt_tokens}")
        held = HeldKv(reservation.grant.held.held, reservation.grant.exact)
        if handoff.held != held:
            return self._refusal("held", f"{handoff.held.words} are held, it says; here are {held.words}")
        return None

    def _unlike(self, fingerprint: Fingerprint) -> str | None:
        """Why this node and a node with `fingerprint` cannot exchange KV; None if they can."""
        field = self._fingerprint.mismatch(fingerprint)
        if field is not None:
            return f"fingerprints differ in {field}"
        try:
            wire_form(fingerprint.wire_form)
        except ConfigError as error:
            return str(error)
        return None

    def _refusal(self, reason: str, message: str) -> HandshakeRefused:
        self.refused[reason] += 1
        return HandshakeRefused(message)

    async def _receive(
        self, reservation: Reservation, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]
    ) -> CommittedHandoff:
        began = perf_counter()
        expected = self._expected(handoff)
        ledger = FrameLedger(handoff.transfer_id, handoff.epoch, expected)
        held_tokens = handoff.held.pages * expected.layout.page_tokens
        bill = _Bill()
        async for item in frames:
            if reservation.arrival.done():
                raise TransferError(f"transfer {handoff.transfer_id} was cancelled at the decode node")
            if isinstance(item, HandoffEnd):
                self._finish(ledger, item)
                await self._strip.seal(reservation.grant, handoff.transfer_id)
                receipt = Receipt(
                    handoff.transfer_id,
                    handoff.num_tokens,
                    tuple(sorted(bill.by_plane.items())),
                    bill.header_bytes,
                    fp16_bytes(expected.layout, handoff.num_tokens - held_tokens),
                    perf_counter() - began,
                    bill.decode_s,
                    held_tokens,
                )
                return CommittedHandoff(receipt, item.first_token)
            bill.add(item, await self._strip.land(reservation.grant, ledger.check(item)))
        raise FrameRefused("the stream ended before its end frame", "truncated")

    def _expected(self, handoff: Handoff) -> Expected:
        runner, form = self._runner, wire_form(handoff.fingerprint.wire_form)
        rows = rows_held(runner.codec, handoff.num_tokens)
        return expected_of(runner.codec, runner.layout, rows, form, handoff.held)

    def _finish(self, ledger: FrameLedger, end: HandoffEnd) -> None:
        ledger.finish(end)
        if not 0 <= end.first_token < self._runner.model.spec.vocab:
            raise FrameRefused(f"first_token {end.first_token} is outside the vocabulary", "range")


@dataclass(slots=True)
class _Bill:
    """Bytes of a handoff on the wire, and the seconds that its frames took to land."""

    by_plane: Counter[str] = field(default_factory=Counter)
    header_bytes: int = 0
    decode_s: float = 0.0

    def add(self, frame: KvFrame, decode_s: float) -> None:
        """Count one more frame."""
        self.decode_s += decode_s
        self.header_bytes += frame.header_bytes
        for span in frame.planes:
            self.by_plane[span.name] += span.coded_bytes
