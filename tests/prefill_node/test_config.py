"""Limits of a prefill node that depend on its device."""

from __future__ import annotations

import pytest

from hackkv.config import load
from hackkv.errors import ConfigError
from hackkv.nodes import Busiest
from prefill_node.config import CHUNK_TOKENS, GPU_CHUNK_TOKENS, SCORED_ROWS, PrefillConfig, PrefillSettings


def test_a_pass_on_a_gpu_has_more_rows_unless_the_settings_say_how_many() -> None:
    auto, fixed = PrefillSettings(), PrefillSettings(chunk_tokens=96)
    assert [auto.chunk_tokens_on(device) for device in ("cpu", "cuda")] == [CHUNK_TOKENS, GPU_CHUNK_TOKENS]
    assert [fixed.chunk_tokens_on(device) for device in ("cpu", "cuda")] == [96, 96]


@pytest.mark.parametrize(("rows", "scored"), [(16, 24), (96, 96), (4096, SCORED_ROWS)])
def test_the_busiest_pass_scores_a_part_of_its_rows_or_ends_every_prompt(rows: int, scored: int) -> None:
    settings = PrefillSettings(max_prompts=24, resume_points=3, chunk_tokens=rows)
    assert settings.busiest("cpu") == Busiest(27, rows, scored)


@pytest.mark.parametrize("wrong", [0, -512, "most"])
def test_chunk_tokens_is_a_number_or_auto(wrong: object) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        load(PrefillConfig, None, {"chunk_tokens": wrong})
