"""The allowed formats of pages of levels, and the feedback that their kernels accept."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.level_format import (
    GAIN_STEP,
    HEAD_DIMS,
    LEVEL_BITS,
    MAX_GAIN,
    MAX_GAINS,
    Feedback,
    LevelFormat,
    on_grid,
)
from hack_kernels.reference.levels import top_level
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hack_kernels.pools import random_rows

BITS = st.sampled_from(LEVEL_BITS)


@settings(max_examples=60)
@given(bits=BITS, seed=st.integers(0, 9999), dim=st.sampled_from(HEAD_DIMS), spread=st.sampled_from([0.01, 1.0, 100.0]))
def test_sums_of_levels_are_exact_for_all_gains_that_are_taken(bits: int, seed: int, dim: int, spread: float) -> None:
    """Therefore sums may be taken in any order, with or without fused multiply-adds."""
    feedback = Feedback(on_grid((random_rows(seed, 1, dim, dim) * spread).triu(1)), torch.ones(1, dim))
    feedback.check(dim)
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 2**bits, (1, 5, dim), generator=generator) - top_level(bits)
    levels[:, 0] = feedback.gains[:, 0].sign() * top_level(bits)
    exact = levels.double() @ (feedback.gains.double().mT + torch.eye(dim))
    assert torch.equal(exact, exact.float().double())
    assert bool((exact.abs() * 2 / GAIN_STEP < 2**24).all())
    assert torch.equal(on_grid(feedback.gains), feedback.gains)


def test_gains_are_brought_onto_the_grid_and_no_further() -> None:
    gains = torch.zeros(1, 64, 64)
    gains[0, 0, 1], gains[0, 1, 2], gains[0, 2, 3:], gains[0, 3, 4] = 0.3, -100.0, 5.0, 7 * GAIN_STEP
    found = on_grid(gains)[0]
    assert 0 <= 0.3 - float(found[0, 1]) < GAIN_STEP
    assert float(found[1, 2]) == GAIN_STEP - MAX_GAIN
    assert MAX_GAINS - 2 < float(found[2].sum()) <= MAX_GAINS
    assert float(found[3, 4]) == 7 * GAIN_STEP


def test_wrong_settings_and_feedback_are_named() -> None:
    for wrong, said in (
        ({"head_dim": 72}, "head_dim is 72"),
        ({"page_tokens": 48}, "page_tokens is 48"),
        ({"k_bits": 5}, "k_bits is 5"),
        ({"v_bits": 1}, "v_bits is 1"),
    ):
        with pytest.raises(ValueError, match=said):
            LevelFormat(**{"head_dim": 64, **wrong})  # type: ignore[arg-type]  # all are numbers
    gains, weights = torch.zeros(2, 64, 64), torch.ones(2, 64)
    for given_gains, given_weights, said in (
        (gains[..., :32], weights, "gains: .*2, 64, 32"),
        (gains[0], weights, "gains: .*64, 64"),
        (gains[:1], weights, "gains: .*1, 64, 64"),
        (gains.double(), weights, "gains: .*float64"),
        (gains, weights[0], "gains: |weights: "),
        (gains, weights.half(), "weights: .*float16"),
        (gains + 1, weights, "gains: a value on or below the diagonal"),
        (gains.triu(1) + torch.full((64, 64), MAX_GAIN).triu(63), weights, "gains: a value is no multiple"),
        (gains + torch.full((64, 64), 1.5 * GAIN_STEP).triu(1), weights, "gains: a value is no multiple"),
        (gains + torch.ones(64, 64).triu(1) * 1.5, weights, "more than 63 together"),
        (gains, -weights, "weights: a value is not positive and finite"),
        (gains, weights * torch.inf, "weights: a value is not positive and finite"),
    ):
        with pytest.raises(ValueError, match=said):
            Feedback(given_gains, given_weights).check(64)
