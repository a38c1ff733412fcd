"""Log lines on standard error: text for people, or JSON objects for a collector.

A JSON line has `time`, `level`, `logger`, `process` and `message`. A line on behalf of a request also has `request_id`,
and `trace_id` and `span_id` if the request is traced. `error` is a traceback.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal

from transport.trail import TRAIL

LogFormat = Literal["text", "json"]
ACCESS: Final = "hackkv.access"
"""The logger with a line for each request. Text logs leave these lines out."""
FIELDS: Final = "fields"
"""The attribute of a record with additional fields for JSON."""
_CHATTY: Final = ("httpx", "uvicorn.access", "opentelemetry.attributes")


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        trail = TRAIL.get()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if trail.request_id:
            line["request_id"] = trail.request_id
        if (context := trail.span.context) is not None:
            line |= {"trace_id": context.trace_id, "span_id": context.span_id}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(name: str, level: str, form: LogFormat) -> None:
    """Set logging up for the process `name`."""
    handler = logging.StreamHandler(sys.stderr)
    layout = f"%(asctime)s %(levelname)s {name} %(message)s"
    handler.setFormatter(JsonLines(name) if form == "json" else logging.Formatter(layout, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in (*_CHATTY, *(() if form == "json" else (ACCESS,))):
        logging.getLogger(chatty).setLevel(logging.WARNING)
