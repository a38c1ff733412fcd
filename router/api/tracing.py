"""A request as one span and one line of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Final

from starlette.types import Scope

from node.logs import ACCESS, FIELDS
from node.spans import ProcessTracer
from router.life.flight import Flight
from router.life.states import RequestState
from router.watch.account import time_account
from router.watch.metrics import Outcome
from transport.trail import TRACEPARENT, TRACESTATE, TRAIL, NoSpan, TraceContext, Trail, Value, read_traceparent

log = logging.getLogger(ACCESS)

TRACED: Final = "POST"
"""Requests of this method are traced and logged. The others ask about the server, and much too often."""
_FAULTS: Final = 500
"""Statuses from here on are faults of ours."""


@dataclass(slots=True)
class HttpCall:
    """An HTTP request, while it is answered."""

    traceparent: str = ""
    """The trace header of its answer; empty if it has none."""
    status: int = 0
    """The status of its answer; 0 while there is none."""


@contextmanager
def answering(scope: Scope, route: str, request_id: str, arrived: float, spans: ProcessTracer) -> Iterator[HttpCall]:
    """Trace and log what is done in the block for a request, and in the tasks that it starts.

    The span is named after its `route`, not after its path, which a client chooses freely.
    """
    if scope["method"] != TRACED:
        yield HttpCall()
        return
    name = f"{scope['method']} {route}".rstrip()
    attributes: dict[str, Value] = {
        "http.request.method": scope["method"], "url.path": scope["path"], "hackkv.request_id": request_id,
    }  # fmt: skip
    if route:
        attributes["http.route"] = route
    span = spans.begin(name, arrived, _parent(scope), attributes)
    token = TRAIL.set(Trail(request_id, span))
    call = HttpCall(span.context.traceparent if span.context else "")
    failure = ""
    try:
        yield call
    except BaseException as error:
        failure = type(error).__name__
        raise
    finally:
        now = perf_counter()
        if call.status >= _FAULTS:
            failure = failure or str(call.status)
        span.end(now, {"http.response.status_code": call.status}, failure)
        if log.isEnabledFor(logging.INFO):
            fields = {
                "method": scope["method"], "path": scope["path"], "status": call.status,
                "seconds": round(now - arrived, 6),
            }  # fmt: skip
            log.info("%s %s: %s", scope["method"], scope["path"], call.status, extra={FIELDS: fields})
        TRAIL.reset(token)


def trace_sequence(flight: Flight, outcome: Outcome) -> None:
    """End the span of a sequence that is over. It gets a span for each state of the sequence, and its account."""
    marks, span = flight.life.marks, flight.span
    if isinstance(span, NoSpan):
        return
    for (state, began), (_, ended) in pairwise(marks):
        span.child(state, began).end(ended)
    account = time_account(flight.clock)
    stages = account["stages"] | account["sub_stages"]
    attributes: dict[str, Value] = {f"hackkv.stage.{stage}_s": seconds for stage, seconds in stages.items()}
    attributes |= {
        "gen_ai.usage.input_tokens": len(flight.request.prompt_ids),
        "gen_ai.usage.output_tokens": len(flight.output.token_ids),
        "hackkv.cached_tokens": flight.cached_tokens, "hackkv.fetched_tokens": flight.fetched_tokens,
        "hackkv.outcome": str(outcome),
        "hackkv.prefill_node": flight.route.prefill_node, "hackkv.decode_node": flight.route.decode_node,
        "hackkv.attempts": flight.route.attempts,
    }  # fmt: skip
    ended = marks[-1][1] if marks and marks[-1][0] in (RequestState.DONE, RequestState.FAILED) else perf_counter()
    failed = outcome not in (Outcome.STOP, Outcome.LENGTH, Outcome.CANCELLED)
    span.end(ended, attributes, str(outcome) if failed else "")


def _parent(scope: Scope) -> TraceContext | None:
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    return read_traceparent(headers.get(TRACEPARENT.encode(), ""), headers.get(TRACESTATE.encode(), ""))
