"""GuideLLM as users run it: a short benchmark of each endpoint, whose counts agree with the server's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import KEY, MODEL, TOKENIZER, served_to

REQUESTS = 6
POLL_S = "1"
"""GuideLLM says that all is over (`WorkerGroupState.received_callback`) a moment before it hands on the last news. If
its wait for news runs out in that moment, the last request is not counted. Its own 0.1 s did so on busy machines.
"""


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_a_short_benchmark(base_url: str, tmp_path: Path, endpoint: str) -> None:
    server = f"target={base_url.removesuffix('/v1')},model={MODEL},api_key={KEY},request_format={endpoint}"
    served = served_to(
        base_url,
        tmp_path,
        *("guidellm", "run", "--disable-console-interactive", "--backend", f"kind=openai_http,{server}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--output", "kind=json,path=report.json"),
        GUIDELLM__MP_POLL_INTERVAL=POLL_S,
    )
    requests = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"]
    assert not requests["incomplete"]
    told = Counter((one["prompt_tokens"], one["output_tokens"]) for one in requests["successful"])
    assert told == served
    assert told.total() == REQUESTS
    assert {out for _, out in told} == {8}
