"""Links have the rates of their names, and the page agrees with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from bench.links.link import FREE, bits_per_s, shaping
from bench.links.page import Setting, page
from hackkv.errors import ConfigError
from hackkv.timing import Stage

SETTING = Setting("a machine", 0.8, {"short": {"fp16": 2.0, "hack": 3.0}})
REQUESTS = 10


def result(jct_ms: float, kv_bytes: float) -> dict[str, Any]:
    """A result with stages of equal length and `kv_bytes` bytes per request."""
    times = {f"{kind}_{metric}_ms": jct_ms for kind in ("mean", "median", "p99") for metric in ("e2el", "ttft")}
    stage = dict.fromkeys(("mean", "median", "p99"), jct_ms / len(Stage))
    return {
        **times,
        "num_prompts": REQUESTS,
        "completed": REQUESTS,
        "failed": 0,
        "total_input_tokens": 300 * REQUESTS,
        "request_rate": 1.6,
        "request_throughput": 1.5,
        "stages": dict.fromkeys(Stage, stage),
        "sub_stages": {"quantize": {"mean": 1.0}},
        "kv": {"bytes": kv_bytes * REQUESTS, "fp16_bytes": 1.2e6 * REQUESTS, "ratio": kv_bytes / 1.2e6},
        "link_bits_per_s": 2e8,
    }


def test_a_rate_is_read_as_tc_reads_it() -> None:
    assert bits_per_s("200mbit") == 2e8
    assert bits_per_s("10gbit") == 1e10
    assert not shaping(FREE)
    assert any("rate 200mbit" in " ".join(step) for step in shaping("200mbit"))
    for wrong in ("", "fast", "0mbit", "200Mbps", "1gbit; reboot"):
        with pytest.raises(ConfigError, match="--links"):
            shaping(wrong)


def test_the_page_tells_help_from_none_and_from_harm() -> None:
    cells = {
        "short/200mbit/fp16": result(2000, 1.2e6),
        "short/200mbit/hack": result(500, 0.2e6),
        "short/10gbit/fp16": result(1000, 1.2e6),
        "short/10gbit/hack": result(1020, 0.2e6),
        "short/none/fp16": result(1000, 1.2e6),
        "short/none/hack": result(1100, 0.2e6),
    }
    text = page(cells, SETTING)
    assert "| short | 200mbit | 0.25 | 0.25 | helps |" in text
    assert "differ by up to 8%" in text  # hack at 10gbit and none
    assert "| short | 10gbit | 1.02 | 1.02 | no difference |" in text
    assert "| short | none | 1.10 | 1.10 | costs time |" in text
    assert "`hack` **helps** with short prompts at 200mbit." in text
    assert "KV takes 48 ms on an empty link, and 250 ms are waited for" in text
    assert "too much load" not in text


def test_a_cell_that_had_too_much_load_or_lost_requests_is_said_so() -> None:
    slow = {**result(9000, 100e6), "failed": 2}
    slow["stages"] = {**slow["stages"], Stage.PREFILL_QUEUE: {"mean": 2250, "median": 2250, "p99": 2250}}
    text = page({"short/1gbit/fp16": slow, "short/1gbit/hack": result(1000, 0.2e6)}, SETTING)
    assert "`fp16` with short prompts at 1gbit asks for 128% of what the link carries: that is too much load" in text
    assert "waits in the nodes' queues for 62% of the time" in text
    assert "2 requests failed, and are in no time: `fp16`, short prompts at 1gbit." in text
    assert "No cell was repeated" in text
