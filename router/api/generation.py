"""The sequences of one HTTP request: how they run, and what is reported about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from traceback import clear_frames
from typing import Any, Final

from hackkv.timing import StageClock
from hackkv.types import Request, Sampling
from router.api.choices import ChoiceCollector, Delta, token_counts
from router.api.errors import outcome_of
from router.api.served import ServedModel
from router.api.tracing import trace_sequence
from router.life.flight import Flight
from router.scopes import unwrapped
from router.watch.account import kv_account, time_account
from router.watch.metrics import Outcome
from transport.trail import TRAIL, Trail

INTAKE, SEQUENCE = "intake", "sequence"
"""Names of spans: reading, checking and tokenizing a request; a sequence from its request's arrival to its end."""
SETTLED_AT_ONCE: Final = 8
"""Sequences that are counted before others run."""


class Generation:
    """Runs the sequences of one HTTP request side by side."""

    def __init__(
        self,
        served: ServedModel,
        request_id: str,
        arrived: float,
        jobs: Sequence[tuple[ChoiceCollector, Sampling]],
        cache_salt: str = "",
    ) -> None:
        self._served = served
        self.request_id = request_id
        self.choices = [choice for choice, _ in jobs]
        self._flights = [
            Flight(
                Request(f"{request_id}-{choice.index}", choice.prompt_ids, sampling, cache_salt),
                StageClock(start=arrived),
                choice.take,
            )
            for choice, sampling in jobs
        ]
        call = TRAIL.get().span
        call.child(INTAKE, arrived).end(perf_counter())
        for choice, flight in zip(self.choices, self._flights, strict=True):
            choice.flight = flight
            flight.span = call.child(SEQUENCE, arrived, {"hackkv.request_id": flight.request.request_id})

    async def run(self, on_delta: Callable[[Delta], None] | None = None) -> None:
        """Run to the end. Raises the first error; the other sequences are then cancelled."""
        if on_delta is not None:
            for choice in self.choices:
                choice.on_delta = on_delta
        for flight in self._flights:
            self._served.journal.began(flight)
        if len(self._flights) == 1:
            await self._serve(self._flights[0])
            return
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                await asyncio.wait([tasks.create_task(self._serve(flight)) for flight in self._flights])

    async def _serve(self, flight: Flight) -> None:
        """Serve a sequence. Calls of nodes meanwhile belong to its trace."""
        token = TRAIL.set(Trail(flight.request.request_id, flight.span))
        try:
            await self._served.dispatcher.serve(flight)
        except asyncio.CancelledError as cancelled:
            clear_frames(cancelled.__traceback__)  # they hold the task, which will hold the error: a cycle
            raise
        finally:
            TRAIL.reset(token)

    @property
    def writing(self) -> asyncio.Lock:
        """See `ServedModel`."""
        return self._served.writing

    async def settle(self, error: BaseException | None) -> None:
        """Count every sequence. Called when the last byte has been sent, or when none will follow.

        Other tasks run in between. If it is cancelled, it counts the rest at once.
        """
        sequences = zip(self._flights, self.choices, strict=True)
        try:
            for nth, (flight, choice) in enumerate(sequences, start=1):
                self._settle(flight, choice, error)
                if nth % SETTLED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            for flight, choice in sequences:
                self._settle(flight, choice, error)

    def _settle(self, flight: Flight, choice: ChoiceCollector, error: BaseException | None) -> None:
        if choice.finish is not None:
            outcome = Outcome(choice.finish)
        elif error is not None:
            outcome = outcome_of(error)
        else:
            outcome = Outcome.FAILED
        trace_sequence(flight, outcome)
        self._served.metrics.ended(flight, outcome)
        self._served.journal.ended(flight, outcome)
        choice.settle()

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts. A prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt_ids): choice for choice in reversed(self.choices)}.values()
        prompt = sum(len(choice.prompt_ids) for choice in prompts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        return token_counts(prompt, completion, sum(choice.cached_tokens for choice in prompts))

    def report(self) -> dict[str, Any]:
        """The opt-in field `hackkv`: seconds by stage, and bytes that were moved.

        With several sequences the stages are those of the one that ended last, since it made the client wait.
        """
        flight = max(self._flights, key=lambda flight: flight.output.at_s[-1] if flight.output.at_s else 0.0)
        receipts = [receipt for each in self._flights for receipt in each.route.receipts]
        return {
            **time_account(flight.clock),
            "kv": kv_account(self._served.dispatcher.fleet.nodes.codec, receipts),
            "prefill_node": flight.route.prefill_node,
            "decode_node": flight.route.decode_node,
            "attempts": flight.route.attempts,
        }
