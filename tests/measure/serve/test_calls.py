"""The planned requests: arrivals, lengths, prompts and traces."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.errors import ConfigError
from hackkv.packaged import SHIPPED, SHIPPED_NAME
from measure.serve.arrivals import arrival_times
from measure.serve.calls import from_trace, read_trace
from measure.serve.prompts import PromptMaker, find_tokenizer
from measure.serve.shapes import SHAPES, Spread

MANY = 20_000


@pytest.fixture(scope="module", name="prompts")
def make_prompts() -> PromptMaker:
    return PromptMaker(find_tokenizer(SHIPPED_NAME))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(burstiness: float) -> None:
    times = arrival_times(MANY, 8.0, burstiness, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0, 0, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_have_the_mean_and_the_bounds_of_table_4(name: str) -> None:
    for spread in (SHAPES[name].prompt, SHAPES[name].output):
        lengths = np.array(spread.draw(MANY, np.random.default_rng(0)))
        assert lengths.mean() == pytest.approx(spread.mean, rel=0.02)
        assert lengths.min() >= spread.low
        assert lengths.max() <= spread.high


@given(low=st.floats(0.1, 1e4), width=st.floats(0.1, 1e5), share=st.floats(0.02, 0.98), factor=st.floats(0.01, 10))
def test_any_mean_between_the_bounds_is_met(low: float, width: float, share: float, factor: float) -> None:
    spread = Spread(low + share * width, low, low + width).scaled(factor)
    lengths = np.array(spread.draw(2_000, np.random.default_rng(0)))
    assert abs(lengths.mean() - max(1, spread.mean)) <= 0.05 * width * factor + 1
    assert lengths.min() >= max(1, math.floor(spread.low))
    assert lengths.max() <= max(1, math.ceil(spread.high))


@pytest.mark.parametrize("tokens", [1, 2, 17, 300, 4000])
def test_prompts_are_held_out_text_of_the_wanted_length(prompts: PromptMaker, tokens: int) -> None:
    rng = np.random.default_rng(0)
    made = [prompts.text(tokens, rng) for _ in range(20)]
    assert all(prompts.count(text) == count for text, count in made)
    assert sum(count == tokens for _, count in made) >= 18
    assert all(abs(count - tokens) <= 2 for _, count in made)
    assert len({text for text, _ in made}) >= 15
    held_out = (SHIPPED / "held_out.jsonl").read_text(encoding="utf-8")
    assert all(line in held_out for text, _ in made for line in text.split("\n")[1:-1] if line.isalnum())


def test_a_trace_is_sent_in_the_order_of_its_times_with_its_texts(tmp_path: Path, prompts: PromptMaker) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 2000, "input_length": 100, "output_length": 8, "hash_ids": [1]}\n\n'
        '{"timestamp": 500, "text_input": "a line\u2028of text", "output_tokens": 4}\n'
    )
    trace = read_trace(path)
    assert [line.timestamp for line in trace] == [500, 2000]
    calls = from_trace(trace, (0.5, 2.0), 0.5, prompts, np.random.default_rng(0))
    assert [call.output_tokens for call in calls] == [2, 4]
    assert calls[0].prompt == "a line\u2028of text"
    assert calls[1].prompt_tokens == 50


BAD = {
    "no output": ('{"prompt": "a"}', ":1: output_length: Field required"),
    "no prompt": ('{"output_length": 3}', "neither prompt nor input_length"),
    "no JSON": ("prompt,output", ":1: Invalid JSON"),
    "second line": ('{"prompt": "a", "output_length": 3}\n{"prompt": "", "output_length": 3}', ":2: prompt"),
    "half timed": ('{"prompt": "a", "output_length": 3, "timestamp": 1}\n{"prompt": "a", "output_length": 3}', "some"),
    "empty": ("\n", "no requests"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_trace_is_refused_by_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl") as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer: .*tokenizer\.json"):
        find_tokenizer(str(tmp_path))
