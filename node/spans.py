"""Where spans come from: OpenTelemetry if an address for them is set, else nowhere.

A span's times are readings of the clock of the process that makes it, and never of another's. Between machines whose
clocks differ, spans of a node may lie before or behind the router's that they belong to, by that difference.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol

from hackkv.config import TracesConfig
from transport.trail import NoSpan, TraceContext, TraceSpan, Value

_ENVIRONMENT: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own settings, which hold where the configuration names no address."""
_DISABLED: Final = "OTEL_SDK_DISABLED"


class ProcessTracer(Protocol):
    """Makes the spans of one process."""

    def begin(
        self, name: str, start_s: float, parent: TraceContext | None, attributes: Mapping[str, Value] | None = None
    ) -> TraceSpan:
        """Begin to answer a call. `start_s` is a reading of `perf_counter`."""
        ...

    async def close(self) -> None:
        """Send what has not been sent, within a bounded time."""
        ...


class NoSpans:
    """Makes none."""

    def begin(
        self, name: str, start_s: float, parent: TraceContext | None, attributes: Mapping[str, Value] | None = None
    ) -> TraceSpan:
        """A span that nobody records."""
        return NoSpan(parent)

    async def close(self) -> None:
        """Nothing is left to send."""


def open_spans(config: TracesConfig, role: str, node_id: str) -> ProcessTracer:
    """Spans of a process. OpenTelemetry's SDK is imported only if they go somewhere."""
    wanted = config.endpoint or any(os.environ.get(name) for name in _ENVIRONMENT)
    if not wanted or os.environ.get(_DISABLED, "").lower() == "true":
        return NoSpans()
    spans: ProcessTracer = import_module("node.otel").OtelSpans(config, role, node_id)
    return spans
