"""Sends calls at their times. It does not wait for an answer before the next call, unless concurrency is limited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from measure.serve.calls import PlannedRequest
from measure.serve.client import RequestOutcome


class RequestSender(Protocol):
    """Sends one call; see `measure.serve.client.Client`."""

    async def send(self, call: PlannedRequest, fields: dict[str, Any]) -> RequestOutcome:
        """Send a call and return its outcome."""
        ...


async def run_load(
    sender: RequestSender,
    calls: Sequence[PlannedRequest],
    fields: dict[str, Any],
    max_concurrency: int | None,
    on_sent: Callable[[], None],
    on_outcome: Callable[[RequestOutcome], None],
) -> tuple[list[RequestOutcome], float]:
    """Send every call; returns the outcomes in the order of the calls, and the seconds of the whole run."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    began = perf_counter()

    async def send_one(call: PlannedRequest) -> RequestOutcome:
        async with places:
            sent_s = perf_counter() - began
            on_sent()
            outcome = await sender.send(call, fields)
        outcome.sent_s, outcome.held_s = sent_s, sent_s - call.at_s
        on_outcome(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for call in calls:
            await asyncio.sleep(began + call.at_s - perf_counter())  # if late, this is negative and only yields
            tasks.append(group.create_task(send_one(call)))
    return [task.result() for task in tasks], perf_counter() - began
