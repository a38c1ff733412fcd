"""AIPerf as users run it: a short benchmark of each endpoint, whose counts agree with the server's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import KEY, MODEL, TOKENIZER, served_to

REQUESTS = 6


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_short_benchmark(base_url: str, tmp_path: Path, endpoint: str) -> None:
    served = served_to(
        base_url,
        tmp_path,
        *("aiperf", "profile", "--model", MODEL, "--url", base_url.removesuffix("/v1"), "--api-key", KEY),
        *("--endpoint-type", endpoint, "--streaming", "--tokenizer", str(TOKENIZER), "--use-server-token-count"),
        *("--concurrency", "2", "--request-count", str(REQUESTS), "--isl", "64", "--osl", "8", "--random-seed", "1"),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", "out", "--ui", "none"),
    )
    lines = (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    assert not [one for one in requests if one.get("error")]
    counts = ("input_sequence_length", "output_sequence_length")
    told = Counter(tuple(one["metrics"][name]["value"] for name in counts) for one in requests)
    assert told == served
    assert told.total() == REQUESTS
    assert {out for _, out in told} == {8}
