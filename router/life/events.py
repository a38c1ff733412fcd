"""Reading a node's stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from hackkv.errors import NodeLost
from hackkv.types import DecodeEvent
from transport.decode_call import DecodeCall

EventT = TypeVar("EventT")


async def expect(events: AsyncIterator[object], kind: type[EventT], who: str) -> EventT:
    """The next event, which must be a `kind`. Raises `NodeLost` if the stream ends or breaks the protocol."""
    async for event in events:
        if isinstance(event, kind):
            return event
        raise NodeLost(f"{who} sent {type(event).__name__} where {kind.__name__} was due")
    raise NodeLost(f"{who} ended its stream before {kind.__name__}")


async def hand_on(events: AsyncIterator[DecodeEvent], take: Callable[[DecodeEvent], bool]) -> None:
    """Hand events to `take` until it returns True or the stream ends.

    A node in this process gives a plain generator, which costs a turn of the event loop for each event.
    """
    if isinstance(events, DecodeCall):
        await events.each(take)
        return
    async for event in events:
        if take(event):
            return
