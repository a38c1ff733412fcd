"""A collector of OTLP over HTTP for tests. It accepts batches on loopback and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """A span that has arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty at the root of a trace."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: str
    """The message of a failed span; "" for others."""


class Collector:
    """A collector that listens within its `with` block."""

    def __init__(self) -> None:
        self._spans: list[SpanSeen] = []
        self._news = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.headers: list[dict[str, str]] = []

    @property
    def base(self) -> str:
        """The value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def endpoint(self) -> str:
        """The value for the setting `traces.endpoint`."""
        return f"{self.base}/v1/traces"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, *names: str) -> list[SpanSeen]:
        """Wait until there is a span of each name; return all spans of those names. Without names, return all spans."""
        with self._news:
            if not self._news.wait_for(lambda: not self._missing(names), PATIENCE_S):
                raise AssertionError(
                    f"no span {self._missing(names)} came; those that came: {[span.name for span in self._spans]}"
                )
            return [span for span in self._spans if not names or span.name in names]

    def _missing(self, names: tuple[str, ...]) -> set[str]:
        return set(names) - {span.name for span in self._spans}

    def span(self, name: str) -> SpanSeen:
        """Wait for the only span of a name; return it."""
        (found,) = self.spans(name)
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.take(ExportTraceServiceRequest.FromString(body), dict(self.headers))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def take(self, batch: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        """Keep the spans of a batch."""
        with self._news:
            self.headers.append({name.lower(): value for name, value in headers.items()})
            for resource in batch.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        failed = span.status.message if span.status.code == Status.STATUS_CODE_ERROR else ""
                        ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                        times = (span.start_time_unix_nano, span.end_time_unix_nano)
                        seen = SpanSeen(service, span.name, *ids, *times, _attributes(span.attributes), failed)
                        self._spans.append(seen)
            self._news.notify_all()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    value: AnyValue = pair.value
    return getattr(value, str(value.WhichOneof("value")))
