"""Calls of a prefill node, as its router makes them. Fixtures for tests of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from hackkv.types import (
    HandedOff,
    HandoffFailed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Request,
)
from prefill_node.service import PrefillService
from transport.closing import closing


async def collect(
    events: AsyncIterator[PrefillEvent], on_event: Callable[[], None] | None = None
) -> list[PrefillEvent]:
    """Read a call up to the outcome of its first push. `on_event` is called after each event."""
    found = []
    async with closing(events):
        async for event in events:
            found.append(event)
            if on_event:
                on_event()
            if isinstance(event, HandedOff | HandoffFailed):
                break
    return found


async def close(events: AsyncIterator[object]) -> None:
    """End a call whose generator the test holds."""
    async with closing(events):
        pass


async def prefill_only(service: PrefillService, request: Request) -> Prefilled:
    """Run a prompt without a handoff."""
    (event,) = await collect(service.prefill(PrefillJob(request, request.request_id, 0, handoff=False)))
    assert isinstance(event, Prefilled)
    return event
