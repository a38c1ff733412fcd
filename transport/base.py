"""The protocols between rooms. A room is written against these protocols and never against gRPC.

A node's service implements `PrefillNode` or `DecodeNode`. A remote client of that node implements the same protocol, so
a test can connect two rooms directly. An error that is raised on the far side arrives as the same `hackkv.errors` class
with the same message. Closing the iterator of a call (or cancelling the task that reads it) cancels the call on the far
side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.nodes import Lease, NodeInfo
from hackkv.types import (
    DecodeEvent,
    DecodeJob,
    Handoff,
    HandoffEnd,
    KvFrame,
    PrefillEvent,
    PrefillJob,
    Receipt,
)

Deliver = Callable[[Handoff, AsyncIterator[KvFrame | HandoffEnd]], Awaitable[Receipt]]
"""The receiving room's side of a wire. It either raises `HandshakeRefused` before it asks for the first frame, or it
starts to read. When it asks for the first frame, the wire tells the sender to go on. Reading slowly is the
back-pressure. A lost sender shows as `NodeLost` at the next frame. The room then has the wire's frame timeout to
return."""

Lend = Callable[[Handoff], AsyncIterator[KvFrame | HandoffEnd]]
"""The same room's side of a fetch: pages [held.pages, num_tokens / page_tokens) of the transfer that the handoff names,
as frames, then their end. Planes are coded as the handoff's fingerprint says. Raises `HandshakeRefused` if the node
does not lend these pages, and `TransferError` when they cease to be held. Closing the iterator ends the fetch."""


class KvPusher(Protocol):
    """Sends handoffs to decode nodes."""

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send one handoff; return when the receiver has committed it.

        `frames` is not touched before the receiver has accepted the handshake. At the end it is closed if it is a
        generator. An error that `frames` raises is raised here. Raises `HandshakeRefused`, `FrameRefused` (the
        receiver's verdict, word for word), `NodeLost`, or `DeadlineExceeded` when the receiver stalls.
        """
        ...

    async def close(self) -> None:
        """Drop every connection; pushes under way fail with `NodeLost`."""
        ...


class KvSender(KvPusher, Protocol):
    """A prefill node's end of a wire. It also fetches pages from decode nodes."""

    def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch the frames that `Lend` gives. Raises its errors, or `NodeLost`.

        Over gRPC, payloads travel in their frames, even where a link carries those of pushes. Leaving the generator
        cancels the call at the peer. The caller sets a deadline itself.
        """
        ...


class KvListener(Protocol):
    """Receives handoffs on a decode node."""

    async def serve(self, deliver: Deliver, lend: Lend | None = None) -> str:
        """Start to accept handoffs, and to lend pages; return the address that senders dial."""
        ...

    async def close(self) -> None:
        """Stop accepting; handoffs under way fail at the sender with `NodeLost`."""
        ...


class PrefillNode(Protocol):
    """A prefill node, as the router may call it."""

    def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt. Yields `Prefilled`, then the fate of each push: `HandedOff` or `HandoffFailed`.

        There are pushes only if `job.handoff` is set and token 0 did not end the request. The stream stays open as long
        as the node has the KV, so that `assign` can send it again. The stream ends when the node gives up the KV. The
        caller closes the stream when the request is over; the node then frees the KV.
        """
        ...

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a job (`WireAddress.url`). The first assignment has the job's epoch.

        A later assignment, after that node was lost, has a later epoch. It cancels a push of an earlier epoch that is
        still under way. `held` is what the new node's `Reserved` said: only the rest is sent.

        Raises `HandshakeRefused` when the transfer is not known here, its KV is gone, the epoch is not newer, or the
        new node lacks pages that the first one held: those were never put into frames.
        """
        ...

    async def describe(self) -> NodeInfo:
        """Report identity, capacity and load."""
        ...


class DecodeNode(Protocol):
    """A decode node, as the router may call it."""

    def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request. Yields `Reserved`, `Landed`, the tokens from index 1 on, then `Decoded`.

        With `job.emitted` the tokens start after those. `Swapped` comes each time that the sequence leaves the node's
        page pool for a while. Raises `Overloaded` instead of yielding `Reserved` when there is no room. Raises
        `NodeDraining` at any point when the node is about to stop: another node must go on.
        """
        ...

    async def describe(self) -> NodeInfo:
        """Report identity, capacity and load."""
        ...


class Registry(Protocol):
    """The router, as a node may call it."""

    async def register(self, info: NodeInfo) -> Lease:
        """Join the fleet or renew the lease. Raises `HandshakeRefused` naming a field that differs from the fleet's."""
        ...
