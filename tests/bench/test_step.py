"""The decode step's overhead: what counts as a step, as operators and as Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import step
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker
from hackkv.packaged import SHIPPED

LAYERS = 2


@pytest.mark.parametrize("recorded", [True, False])
def test_parts_of_a_step_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    monkeypatch.setattr(step, "PROMPT", 70)
    monkeypatch.setattr(step, "STEPS", 20)
    monkeypatch.setattr(step, "WATCHED", range(8, 12))
    write_tiny(tmp_path / "tiny", Tiny(layers=LAYERS, head_dim=64))
    worker = load_worker(ModelConfig(path=str(tmp_path / "tiny"), backend="cpu"), CodecConfig(name="hack"))
    times = step.measure(worker, 3, step.GREEDY, recorded=recorded)
    # The first token comes with the prompt's last row. A watched step, the step after one, and the first do not count.
    assert len(times.steps) == len(times.between) == 20 - 4 - 2
    assert len(times.python) == 4 - 1
    assert all(0 < between < whole for between, whole in zip(times.between, times.steps, strict=True))
    assert all(seconds > 0 for seconds in times.python)
    products = 4 * LAYERS + 1
    # A step has three rows, also of logits. If the library multiplies, each layer has norms, rotation, append,
    # attention and gate. If our kernels multiply, each layer has a product, rotation, append, attention, and one call
    # for the rest. Both also have the rows of the embedding and of the rotation, one norm and the choice; our kernels
    # also the product of the logits. If torch computes nothing, all but that product and the choice are one call.
    ours = worker.model.library_rows > 3
    computed = 5 + 5 * LAYERS if ours else 4 + 6 * LAYERS
    assert times.kernels == (3 if ours and recorded else computed)
    assert times.operators > (0 if ours else products)
    found = step.summary(times, 3, "greedy")
    assert found["share"] == pytest.approx((found["between_ms"] + found["python_ms"]) / found["step_ms"])
    text = step.section(worker, [found])
    assert f"| greedy | 3 | {found['step_ms']:.2f} |" in text
    assert f"| {times.operators} | {times.kernels} | {found['share']:.0%} | ≤ 20% |" in text


def test_the_second_row_samples_as_the_shipped_model_proposes() -> None:
    sampling = step.proposed(SHIPPED)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.6, 0.9, 1.1)
    assert sampling.ignore_eos
