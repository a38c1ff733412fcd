"""A prefill node's part in a request: token 0, and KV that can be sent to a decode node more than once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hackkv.errors import HandshakeRefused, NodeLost
from hackkv.held import HeldKv
from hackkv.types import Prefilled, PrefillEvent, PrefillJob
from router.fleet.booking import Booking
from router.life.events import expect
from router.life.failover import KvGone
from transport.base import PrefillNode


class PrefillLeg:
    """One job on one prefill node. Read its stream under `booking.guard`. `kept`: the node still keeps the KV."""

    def __init__(self, booking: Booking[PrefillNode], job: PrefillJob) -> None:
        self.booking = booking
        self._job = job
        self.events: AsyncIterator[PrefillEvent] = booking.node.prefill(job)
        self.token0 = asyncio.Event()
        """Set when the client has the first token."""
        self.kept = True

    @property
    def node_id(self) -> str:
        """The node's name."""
        return self.booking.member.node_id

    async def first(self) -> Prefilled:
        """Wait for token 0 and release the booking: the prompt has left the node's queue, whatever the handoff does.

        Raises `NodeLost` if the node breaks the protocol.
        """
        prefilled = await expect(self.events, Prefilled, f"prefill node {self.node_id}")
        request, scored = self._job.request, len(prefilled.prompt_logprobs)
        due = 0 if request.sampling.prompt_logprobs is None else len(request.prompt_ids) - 1
        if scored != due:
            raise NodeLost(f"prefill node {self.node_id} scored {scored} tokens of a prompt where {due} were due")
        self.booking.worked()
        self.booking.release()
        return prefilled

    async def assign(self, epoch: int, address: str, held: HeldKv) -> None:
        """Tell the node where the KV goes, and how many pages are there already. Raises `KvGone` if it does not have
        the others, and `NodeLost`."""
        try:
            await self._assign(epoch, address, held)
        except HandshakeRefused as error:
            raise KvGone(str(error)) from error

    async def _assign(self, epoch: int, address: str, held: HeldKv) -> None:
        assign, transfer_id = self.booking.node.assign, self._job.transfer_id
        try:
            await assign(transfer_id, epoch, address, held)
        except HandshakeRefused:
            if self.token0.is_set():
                raise
            # The assignment can arrive before its job. After token 0 the node certainly knows the job.
            await self.token0.wait()
            await assign(transfer_id, epoch, address, held)
