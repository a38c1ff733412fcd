"""Spans by OpenTelemetry, sent as OTLP over HTTP. Only `node.spans` imports this module, and only if tracing is on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from time import perf_counter, time_ns
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as Recorded

from hackkv import __version__
from hackkv.config import TracesConfig
from transport.trail import TraceContext, TraceSpan, Value

EXPORT_S: Final = 2.0
"""Seconds that the export of one batch may take."""
EVERY_S: Final = 1.0
"""Seconds between batches."""
CLOSE_S: Final = 2.0
"""Seconds for which the last batch may delay the end of the process."""


class OtelSpans:
    """Makes spans and sends them from a thread of its own."""

    def __init__(self, config: TracesConfig, role: str, node_id: str) -> None:
        names = {"service.name": f"hackkv-{role}", "service.version": __version__, "service.instance.id": node_id}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
            resource=Resource.create(names),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=config.endpoint or None, headers=dict(config.headers) or None, timeout=EXPORT_S
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EVERY_S * 1000))
        self._tracer = self._provider.get_tracer("hackkv", __version__)
        self._epoch_ns = time_ns() - round(perf_counter() * 1e9)

    def begin(
        self, name: str, start_s: float, parent: TraceContext | None, attributes: Mapping[str, Value] | None = None
    ) -> TraceSpan:
        """See `ProcessTracer`."""
        above = set_span_in_context(NonRecordingSpan(_context(parent))) if parent else None
        at = self._epoch_ns + round(start_s * 1e9)
        span = self._tracer.start_span(name, above, SpanKind.SERVER, attributes, start_time=at)
        return OtelSpan(self._tracer, self._epoch_ns, span)

    async def close(self) -> None:
        """See `ProcessTracer`."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def work() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        # A daemon thread: a collector that does not answer must not delay the end of the process.
        threading.Thread(target=work, daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await done.wait()
        except TimeoutError:
            pass


class OtelSpan:
    """A `TraceSpan` around a span of OpenTelemetry."""

    def __init__(self, tracer: Tracer, epoch_ns: int, span: Recorded) -> None:
        self._tracer, self._epoch_ns, self._span = tracer, epoch_ns, span
        context = span.get_span_context()
        self._context = TraceContext(
            f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled,
            context.trace_state.to_header(),
        )  # fmt: skip

    @property
    def context(self) -> TraceContext:
        """See `TraceSpan`."""
        return self._context

    def child(self, name: str, start_s: float, attributes: Mapping[str, Value] | None = None) -> TraceSpan:
        """See `TraceSpan`."""
        above = set_span_in_context(self._span)
        span = self._tracer.start_span(name, above, SpanKind.INTERNAL, attributes, start_time=self._at(start_s))
        return OtelSpan(self._tracer, self._epoch_ns, span)

    def end(self, end_s: float, attributes: Mapping[str, Value] | None = None, failure: str = "") -> None:
        """See `TraceSpan`."""
        if attributes:
            self._span.set_attributes(attributes)
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end(self._at(end_s))

    def _at(self, seconds: float) -> int:
        """Convert a reading of `perf_counter` to nanoseconds of Unix time."""
        return self._epoch_ns + round(seconds * 1e9)


def _context(parent: TraceContext) -> SpanContext:
    return SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
