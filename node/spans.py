"""Makes the spans of a process: by OpenTelemetry if an address for them is set; else none are made.

The times of a span are readings of the clock of the process that makes it, never of another. If the clocks of two
machines differ, a node's spans may be shifted by the difference from the router's span to which they belong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol

from hackkv.config import TracesConfig
from transport.trail import NoSpan, TraceContext, TraceSpan, Value

_ENVIRONMENT: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own settings, which apply if the configuration names no address."""
_DISABLED: Final = "OTEL_SDK_DISABLED"


class ProcessTracer(Protocol):
    """Makes the spans of one process."""

    def begin(
        self, name: str, start_s: float, parent: TraceContext | None, attributes: Mapping[str, Value] | None = None
    ) -> TraceSpan:
        """Begin the span of a call. `start_s` is a reading of `perf_counter`."""
        ...

    async def close(self) -> None:
        """Send what has not been sent, within a bounded time."""
        ...


class NoSpans:
    """A `ProcessTracer` whose spans nobody records."""

    def begin(
        self, name: str, start_s: float, parent: TraceContext | None, attributes: Mapping[str, Value] | None = None
    ) -> TraceSpan:
        """A span that nobody records."""
        return NoSpan(parent)

    async def close(self) -> None:
        """Do nothing: there is nothing to send."""


def open_spans(config: TracesConfig, role: str, node_id: str) -> ProcessTracer:
    """The tracer of a process. OpenTelemetry's SDK is imported only if spans are sent."""
    wanted = config.endpoint or any(os.environ.get(name) for name in _ENVIRONMENT)
    if not wanted or os.environ.get(_DISABLED, "").lower() == "true":
        return NoSpans()
    spans: ProcessTracer = import_module("node.otel").OtelSpans(config, role, node_id)
    return spans
