"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

import pytest

from node.logs import ACCESS, FIELDS, JsonLines, LogFormat, log_to_stderr
from transport.trail import TRAIL, NoSpan, TraceContext, Trail

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)


@pytest.mark.parametrize(
    ("trail", "more"),
    [
        (Trail(), {}),
        (Trail("cmpl-1"), {"request_id": "cmpl-1"}),
        (
            Trail("cmpl-1", NoSpan(TRACE)),
            {"request_id": "cmpl-1", "trace_id": TRACE.trace_id, "span_id": TRACE.span_id},
        ),
    ],
)
def test_a_line_says_what_it_is_about(trail: Trail, more: dict[str, str]) -> None:
    record = logging.LogRecord("router.x", logging.WARNING, "file", 1, "lost %s\n%s", ("é", "d-1"), None)
    setattr(record, FIELDS, {"status": 502})
    token = TRAIL.set(trail)
    line = JsonLines("router").format(record)
    TRAIL.reset(token)
    assert "\n" not in line
    told = json.loads(line)
    at = datetime.fromisoformat(told.pop("time"))
    assert at == datetime.fromtimestamp(round(record.created * 1000) / 1000, UTC) or at.timestamp() <= record.created
    said = {"level": "warning", "logger": "router.x", "process": "router", "message": "lost é\nd-1", "status": 502}
    assert told == said | more


@pytest.mark.parametrize(("form", "shown"), [("json", True), ("text", False)])
def test_lines_for_each_request_are_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: LogFormat, shown: bool
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # with pytest's handlers, `basicConfig` would do nothing
    for logger in (root, *map(logging.getLogger, (ACCESS, "httpx", "uvicorn.access", "opentelemetry.attributes"))):
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    log_to_stderr("router", "info", form)
    logging.getLogger(ACCESS).info("POST /: 200", extra={FIELDS: {"status": 200}})
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("router").exception("it broke")
    lines = capsys.readouterr().err.splitlines()
    assert ("POST /: 200" in lines[0]) == shown
    if shown:
        first, second = map(json.loads, lines)
        assert (first["status"], "ValueError: a bug" in second["error"]) == (200, True)
