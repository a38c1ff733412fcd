"""One request on this node, and the queue where its events wait until the router reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from decode_node.engine import Sequence
from decode_node.inbox import Reservation
from decode_node.names import SequenceNames
from decode_node.seats import Place, Seat
from hackkv.errors import HackkvError
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.kv_memory import HostKv
from hackkv.types import Decoded, DecodeEvent, DecodeJob


@dataclass(slots=True, eq=False, repr=False)
class Stream:
    """A job and its state. Nothing here waits for the reader, so a slow reader holds no pages."""

    job: DecodeJob
    seat: Seat[Stream] = field(init=False)
    names: SequenceNames | None = None
    """The names of its pages; None on a node that keeps no pages."""
    reservation: Reservation | None = None
    """Set when the node expects its KV."""
    loading: asyncio.Task[bool] | None = None
    """Brings pages and exact rows of its prompt back from host memory."""
    held: HeldKv = NOTHING_HELD
    """The part of its prompt that was here when it came."""
    sequence: Sequence = field(init=False)
    """Set when the KV has landed."""
    kv: HostKv | None = None
    """Its KV while it is swapped out."""
    swapped_at: float = 0.0
    _events: asyncio.Queue[DecodeEvent | HackkvError] = field(default_factory=asyncio.Queue)

    @property
    def over(self) -> bool:
        """Whether its seat is given up. There may still be events to read."""
        return self.seat.place is Place.GONE

    def put(self, event: DecodeEvent | HackkvError) -> None:
        """Append an event. An error or `Decoded` is the last one."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[DecodeEvent]:
        """All events up to `Decoded`. If an error ended the stream, raises it."""
        while True:
            event = await self._events.get()
            if isinstance(event, HackkvError):
                raise event
            yield event
            if isinstance(event, Decoded):
                return
