"""The request that a call works for: its id and its place in a trace (W3C Trace Context).

Both travel in the metadata of calls and, within a process, in a context variable, which tasks inherit. So logs and
spans of every process name their request. `node.spans` makes the spans, if tracing is configured. Without tracing, the
client's trace context is passed on all the same, for logs and for other tracers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

Value = str | int | float | bool
"""The types of a span's attributes."""

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
REQUEST_ID: Final = "x-request-id"
MAX_STATE: Final = 512
"""The most characters of a `tracestate` that is passed on; the standard asks for at least as many."""
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE: Final = re.compile(r"[ -~\t]+", re.ASCII)
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A reference to a span. The ids have 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool
    """Whether the spans of the trace are recorded."""
    state: str = ""
    """The `tracestate` of other tracing systems, unchanged."""

    @property
    def traceparent(self) -> str:
        """The value of a `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def read_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """Read a `traceparent` header and the `tracestate` beside it. Returns None if the header is empty or malformed."""
    found = _PARENT.fullmatch(parent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    keeps = len(state) <= MAX_STATE and _STATE.fullmatch(state)
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state if keeps else "")


class TraceSpan(Protocol):
    """A span that is under way. Times are readings of `perf_counter`, in seconds."""

    @property
    def context(self) -> TraceContext | None:
        """The reference to this span; None if there is no trace."""
        ...

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value] | None = None) -> TraceSpan:
        """Begin a span within this one."""
        ...

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """End the span; `failure` says what went wrong, "" if nothing did."""
        ...


@dataclass(frozen=True, slots=True)
class NoSpan:
    """A span that nobody records. It passes on the context that it was given."""

    context: TraceContext | None = None

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value] | None = None) -> TraceSpan:
        """Return this span."""
        return self

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Trail:
    """The request and the span for which the present task works."""

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
    """The trail in the metadata of a call."""
    told = {key: value for key, value in metadata if isinstance(value, str)}
    context = read_traceparent(told.get(TRACEPARENT, ""), told.get(TRACESTATE, ""))
    return Trail(told.get(REQUEST_ID, ""), NoSpan(context))
