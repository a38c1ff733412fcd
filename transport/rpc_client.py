"""Clients of remote nodes and of the router, which implement the protocols of `base.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from hackkv.errors import FrameRefused
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
)
from transport import methods
from transport.channels import ChannelPool
from transport.closing import closing
from transport.convert import (
    ASSIGNMENT,
    DECODE_EVENT,
    DECODE_JOB,
    EMPTY,
    LEASE,
    NODE_INFO,
    PREFILL_EVENT,
    PREFILL_JOB,
    Assignment,
    Empty,
)
from transport.convert_kv import HANDOFF, PUSH_REQUEST
from transport.decode_call import DecodeCall
from transport.prefill_parts import PrefillCall
from transport.replies import replies
from transport.status import translating
from transport.trail import outgoing
from transport.trunk import Trunk

CALL_TIMEOUT_S = 5.0
"""Deadline of calls that return at once (assign, describe, register). The caller of a stream sets deadlines itself."""


class _Client:
    """Calls one address over a shared pool; the pool's owner closes it."""

    def __init__(self, address: str, channels: ChannelPool, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.address = address
        self._channels = channels
        self._timeout_s = timeout_s

    async def _ask(self, method: str, request: bytes) -> bytes:
        """Send one request; return the answer."""
        channel = await self._channels.get(self.address)
        with translating(self.address):
            metadata = (*self._channels.metadata, *outgoing())
            answer: bytes = await channel.unary_unary(method, None, None)(
                request, timeout=self._timeout_s, metadata=metadata
            )
        return answer

    def _trunk_to(self, method: str) -> Callable[[], Awaitable[Trunk]]:
        return lambda: self._channels.trunk(self.address, method)


class PrefillClient(_Client):
    """A `PrefillNode` at an address."""

    def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt at the node. Raises the node's errors, or `NodeLost`."""
        return PrefillCall(self._trunk_to(methods.PREFILL_SERVE), job, PREFILL_JOB, PREFILL_EVENT)

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a job, for the first time or again."""
        assignment = Assignment(transfer_id, epoch, decode_address, held)
        await self._ask(methods.PREFILL_ASSIGN, ASSIGNMENT.encode(assignment))

    async def describe(self) -> NodeInfo:
        """Ask for identity, capacity and load."""
        return NODE_INFO.decode(await self._ask(methods.PREFILL_DESCRIBE, EMPTY.encode(Empty())))


class DecodeClient(_Client):
    """A `DecodeNode` at an address."""

    def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request at the node. Raises the node's errors, or `NodeLost`."""
        return DecodeCall(self._trunk_to(methods.DECODE_SERVE), job, DECODE_JOB, DECODE_EVENT)

    async def describe(self) -> NodeInfo:
        """Ask for identity, capacity and load."""
        return NODE_INFO.decode(await self._ask(methods.DECODE_DESCRIBE, EMPTY.encode(Empty())))


class LenderClient(_Client):
    """Pages that the decode node at an address lends (`transport.base.Lend`)."""

    async def fetch(self, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch the pages that `handoff` names; leaving the generator in any way cancels the call at the peer.

        Raises the node's errors, `FrameRefused` or `NodeLost`.
        """
        channel = await self._channels.get(self.address)
        with translating(self.address):
            metadata = (*self._channels.metadata, *outgoing())
            call = channel.unary_stream(methods.KV_FETCH, None, None)(HANDOFF.encode(handoff), metadata=metadata)
        async with closing(replies(call, self.address)) as messages:
            async for message in messages:
                item = PUSH_REQUEST.decode(message)
                if not isinstance(item, KvFrame | HandoffEnd):
                    raise FrameRefused(f"a {type(item).__name__} among fetched frames", reason="malformed")
                yield item


class RegistryClient(_Client):
    """A `Registry` at an address: the router, as a node sees it."""

    async def register(self, info: NodeInfo) -> Lease:
        """Join the fleet or renew the lease."""
        return LEASE.decode(await self._ask(methods.REGISTRY_REGISTER, NODE_INFO.encode(info)))
