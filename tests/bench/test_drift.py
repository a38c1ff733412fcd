"""`bench.drift` on a tiny model through a cluster of real processes, and its definition of drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import drift
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.tiny import Tiny, write_tiny
from measure.accuracy.subject import load_subject


@pytest.mark.slow
async def test_a_cluster_answers_its_last_requests_as_its_first(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", Tiny(head_dim=128))
    subject = load_subject(ModelConfig(path=str(folder), dtype="float32", threads=1))
    result = await drift.measure(subject, CodecConfig(name="fp16"), 12, 3, 2, 0)
    assert result == drift.Drift(12, [1.0] * 3, [1.0] * 3, 3, 0)
    assert result.holds


def test_the_last_prompts_are_the_first(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", Tiny())
    prompts = drift.prompts_of(load_subject(ModelConfig(path=str(folder), dtype="float32")), 9, 3, 0)
    assert [np.array_equal(a, b) for a, b in zip(prompts[:3], prompts[-3:], strict=True)] == [True] * 3
    assert len({prompt.tobytes() for prompt in prompts}) == 6


def test_answers_that_change_or_fail_are_drift() -> None:
    exact = [[5, 6, 7, 8], [5, 6, 7, 8]]
    worse = drift.compare([[5, 6, 7, 8], [5, 6, 7], [9], [5, 6, 9, 9], [5, 6, 7, 1]], exact, frozenset((1,)))
    assert (worse.first, worse.last) == ([1.0, 0.75], [0.5, 0.75])
    assert (worse.equal, worse.failed, worse.holds) == (1, 0, False)
    assert "It does not hold" in drift.section(worse, "tiny", "hack", "here")[0]
    lost = drift.compare([exact[0], None], exact[:1], frozenset())
    assert (lost.failed, lost.holds) == (1, False)
