"""Reading a node's stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from hackkv.errors import NodeLost

EventT = TypeVar("EventT")


async def expect(events: AsyncIterator[object], kind: type[EventT], who: str) -> EventT:
    """The next event, which must be a `kind`. Raises `NodeLost` if the stream ends or breaks the protocol."""
    async for event in events:
        if isinstance(event, kind):
            return event
        raise NodeLost(f"{who} sent {type(event).__name__} where {kind.__name__} was due")
    raise NodeLost(f"{who} ended its stream before {kind.__name__}")
