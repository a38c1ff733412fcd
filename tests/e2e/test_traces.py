"""One request through three processes is one trace."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from hackkv.model.tiny import Tiny, write_tiny
from tests.collector import Collector
from tests.e2e import processes
from tests.e2e.processes import START_S, Fleet
from tests.router.processes import ROUTERS

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@ROUTERS
def test_a_request_is_one_trace_over_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    model = write_tiny(tmp_path / "tiny", Tiny(head_dim=64, max_context=1024))
    with Collector() as collector:
        monkeypatch.setitem(processes.ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", collector.base)
        fleet = Fleet(tmp_path, model, {"name": "hack"}, {"log_format": "json", "workers": workers}, num_decode=1)
        try:
            body = {"prompt": list(range(5, 105)), "max_tokens": 6, "ignore_eos": True}
            url = f"{fleet.api.url}/v1/completions"
            response = httpx.post(url, json=body, headers={"traceparent": PARENT}, timeout=START_S)
            assert response.status_code == 200, response.text
        finally:
            fleet.stop()
        spans = collector.spans("POST /v1/completions", "sequence", "Prefill", "Decode", "prefill", "decode")
        assert {span.service for span in collector.spans()} == {"hackkv-router", "hackkv-prefill", "hackkv-decode"}
        assert {span.trace_id for span in collector.spans()} == {PARENT.split("-")[1]}
        by_name = {span.name: span for span in spans}
        chain = ["POST /v1/completions", "sequence", "Prefill", "prefill"]
        for above, below in itertools.pairwise(chain):
            assert by_name[below].parent_id == by_name[above].span_id
        assert by_name["Decode"].parent_id == by_name["sequence"].span_id
