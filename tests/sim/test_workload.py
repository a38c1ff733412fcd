"""Traces of three kinds, and synthetic requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hackkv.errors import ConfigError
from sim.jobs import Arrival
from sim.spec import Load
from sim.workload import read_trace, synthetic, write_trace

TRACES = {
    "mooncake.jsonl": (
        '{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 0, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
    ),
    "azure.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,7322,490\n"
        "2023-11-16 18:17:04.4799600,6758,500\n"
    ),
    "splitwise.csv": "request_id,arrival_timestamp,prompt_size,token_size\n0,3.0,7322,490\n1,3.5,6758,500\n",
    "unsorted.csv": "arrival_timestamp,prompt_size,token_size\n3.5,6758,500\n3.0,7322,490\n",
    "own.jsonl": (
        '{"at_s": 0, "input_length": 7322, "output_length": 490}\n\n'
        '{"at_s": 0.5, "input_length": 6758, "output_length": 500, "max_tokens": 700}\n'
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_traces(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TRACES[name])
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 7322, 490)
    assert (round(second.at_s, 6), second.prompt_tokens, second.output_tokens) == (0.5, 6758, 500)
    assert second.blocks == ((0, 1, 2) if "mooncake" in name else ())
    assert second.max_tokens == (700 if "own" in name else 0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.jsonl",
            '{"input_length": 1, "output_length": 1}\n{"input_length": 0, "output_length": 1}',
            "a.jsonl:2: input",
        ),
        ("a.jsonl", "nonsense", "a.jsonl:1:"),
        ("a.jsonl", "\n", "no requests"),
        ("a.csv", "TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "a.csv:2: 'soon' is neither a time"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1.0,x,1\n", "a.csv:2: input"),
    ],
)
def test_flaws_are_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert words in str(raised.value)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    arrivals = synthetic(Load(shape="arxiv", requests=20), seed=3)
    write_trace(tmp_path / "t.jsonl", arrivals)
    assert read_trace(tmp_path / "t.jsonl") == [
        Arrival(each.at_s, each.prompt_tokens, each.output_tokens, 0, (), 512) for each in arrivals
    ]


def test_another_rate_leaves_lengths_alone() -> None:
    slow, fast = (synthetic(Load(rate=rate, requests=50), seed=1) for rate in (1.0, 10.0))
    assert [each.prompt_tokens for each in slow] == [each.prompt_tokens for each in fast]
    np.testing.assert_allclose([each.at_s for each in slow], [10 * each.at_s for each in fast])


def test_a_ramp_ends_at_its_rate() -> None:
    times = [each.at_s for each in synthetic(Load(rate=1.0, ramp_to=9.0, requests=40_000, burstiness=100.0), seed=1)]
    gaps = np.diff(times)
    assert np.mean(gaps[:200]) == pytest.approx(1.0, rel=0.15)
    assert np.mean(gaps[-200:]) == pytest.approx(1 / 9, rel=0.15)


def test_an_unknown_data_set_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"load\.shape: 'cocktial' is unknown; did you mean cocktail"):
        synthetic(Load(shape="cocktial"), seed=0)
