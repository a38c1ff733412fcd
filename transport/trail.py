"""What a call is part of: the id of a request, and its place in a trace (W3C Trace Context).

Both travel with calls, and within a process in a context variable, which tasks inherit. So logs and spans
of every process name the request that they are about. Spans themselves are made by `node.spans`, if anybody wants them;
without that the trace of a client still goes along, for logs and for whoever else traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

Value = str | int | float | bool
"""What an attribute of a span may be."""

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
REQUEST_ID: Final = "x-request-id"
MAX_STATE: Final = 512
"""Characters of a `tracestate` that is passed on; the standard asks for as many."""
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE: Final = re.compile(r"[ -~\t]+", re.ASCII)
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as others refer to it: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool
    """Whether its spans are recorded."""
    state: str = ""
    """What other tracing systems want to be passed on, as it came."""

    @property
    def traceparent(self) -> str:
        """As a header has it."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def read_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """A `traceparent` header and the `tracestate` beside it; None if there is none, or none that can be understood."""
    found = _PARENT.fullmatch(parent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    keeps = len(state) <= MAX_STATE and _STATE.fullmatch(state)
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state if keeps else "")


class TraceSpan(Protocol):
    """A piece of a request's time, under way. Times are readings of `perf_counter`."""

    @property
    def context(self) -> TraceContext | None:
        """How others refer to it."""
        ...

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value] | None = None) -> TraceSpan:
        """Begin a part of it."""
        ...

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """End it; `failure` says what went wrong, if something did."""
        ...


@dataclass(frozen=True, slots=True)
class NoSpan:
    """A span that nobody records. It passes on the context that it was given."""

    context: TraceContext | None = None

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value] | None = None) -> TraceSpan:
        """Itself."""
        return self

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Trail:
    """What the present task works for."""

    request_id: str = ""
    span: TraceSpan = NoSpan()


TRAIL: Final[ContextVar[Trail]] = ContextVar("trail", default=Trail())  # noqa: B039  # it is frozen


def outgoing() -> tuple[tuple[str, str], ...]:
    """The present trail as metadata of a call."""
    trail = TRAIL.get()
    context = trail.span.context
    told = [(REQUEST_ID, trail.request_id)] if trail.request_id else []
    if context is not None:
        told.append((TRACEPARENT, context.traceparent))
        if context.state:
            told.append((TRACESTATE, context.state))
    return tuple(told)


def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> Trail:
    """The trail that the metadata of a call tells of."""
    told = {key: value for key, value in metadata if isinstance(value, str)}
    context = read_traceparent(told.get(TRACEPARENT, ""), told.get(TRACESTATE, ""))
    return Trail(told.get(REQUEST_ID, ""), NoSpan(context))
