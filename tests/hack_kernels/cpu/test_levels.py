"""Pages of levels in C++, on every instruction set: equal bytes to the definition, and attention that agrees."""

from __future__ import annotations

import itertools

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import Rows
from hack_kernels.level_format import HEAD_DIMS, LEVEL_BITS, PAGE_TOKENS, LevelFormat, Scales
from hack_kernels.window import Window
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hack_kernels import level_pairs as pairs
from tests.hack_kernels.pools import random_rows
from tests.hack_kernels.test_levels import add_row, exact, feedback_of, filled, metrics, one_span

SHAPES = [(d, pi, 3, 2) for d, pi in itertools.product(HEAD_DIMS, PAGE_TOKENS)]
WIDTHS = [(64, 32, k, v) for k, v in itertools.product(LEVEL_BITS, LEVEL_BITS)]
FORMATS = [LevelFormat(*s) for s in (*SHAPES, *WIDTHS, *((80, 32, bits, bits) for bits in LEVEL_BITS))]


@pytest.mark.grid
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("fmt", [*FORMATS, *pairs.NARROW], ids=str)
def test_bytes_equal_the_definition(backend: cpu.CpuBackend, fmt: LevelFormat, fed: bool) -> None:
    feedback = feedback_of(metrics(4, pairs.HEADS, fmt.head_dim)) if fed else None
    k, v = (random_rows(seed, 3 * fmt.page_tokens, pairs.HEADS, fmt.head_dim).half() for seed in (1, 2))
    pairs.assert_bytes_agree(pairs.kernels_of(backend, fmt, feedback), fmt, k, v)


@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 2.0**-14, 1e-3, 300.0, 15000.0, 60000.0, torch.inf])
def test_bytes_equal_the_definition_at_extreme_scales(backend: cpu.CpuBackend, scale: float) -> None:
    feedbacks = (None, feedback_of(metrics(5, pairs.HEADS, 64)), pairs.largest_feedback(64))
    for bits, scales, fed in itertools.product(LEVEL_BITS, Scales, feedbacks):
        pairs.assert_extremes_agree(backend, LevelFormat(64, 32, bits, bits, scales=scales), scale, fed)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("fmt", [*FORMATS[:: len(PAGE_TOKENS) - 1], *pairs.WINDOWED, *pairs.NARROW], ids=str)
def test_attention_agrees_with_the_definition(backend: cpu.CpuBackend, fmt: LevelFormat, group: int) -> None:
    """Prompts that begin inside pages and at their edges, and decode."""
    pi, pages = fmt.page_tokens, fmt.window.pages + 1
    begins = (0, 3, pi - 1, pi, pi + 2, pages * pi - 1, -1)
    pairs.assert_attention_agrees(pairs.kernels_of(backend, fmt), fmt, group, begins)


@pytest.mark.parametrize("fmt", [*FORMATS[:: len(PAGE_TOKENS) - 1], *pairs.WINDOWED, *pairs.NARROW], ids=str)
def test_prompts_equal_fp64_attention_on_what_codes_stand_for(backend: cpu.CpuBackend, fmt: LevelFormat) -> None:
    """Rows around the edges of pages agree to 2e-6 relative, plus the effect of weights near a tie."""
    ours, _ = pairs.kernels_of(backend, fmt)
    pages = fmt.window.pages + 2
    n, d = pages * fmt.page_tokens + 3, fmt.head_dim
    k, v = (random_rows(seed, n, pairs.HEADS, d).half() for seed in (1, 2))
    q = random_rows(3, n, pairs.HEADS * 3, d)
    out = ours.attend(0, filled(ours, fmt, k, v), one_span(0, n, pages), Rows(q, k, v))
    for at, head in ((0, 0), (fmt.page_tokens - 1, 1), (fmt.page_tokens, 4), (n - 1, 5)):
        kv = head // 3
        wanted, slack = exact(fmt, q[at, head], k[:, kv], v[:, kv], at, None)
        error = float((out[at, head].double() - wanted).norm())
        assert error <= 2e-6 * float(wanted.norm()) + slack, (at, head, error, slack)


def test_feedback_goes_by_the_layer_and_the_heads_of_the_model(backend: cpu.CpuBackend) -> None:
    fmt = LevelFormat(64, 32, 2, 2)
    pairs.assert_feedback_goes_by_layer_and_head(pairs.kernels_of(backend, fmt), fmt)


@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_pages_move_between_the_definition_and_cpp(
    backend: cpu.CpuBackend, bits: int, scales: Scales, head_dim: int
) -> None:
    fmt = LevelFormat(head_dim, 64, bits, bits, scales=scales)
    pairs.assert_pages_move(pairs.kernels_of(backend, fmt), fmt)


@settings(max_examples=60)
@given(
    window=st.sampled_from(pairs.WINDOWS),
    spans=st.lists(st.tuples(st.integers(0, 250), st.integers(1, 80)), min_size=1, max_size=3),
    decodes=st.booleans(),
)
def test_windows_agree_with_the_definition_for_any_batch(
    window: Window, spans: list[tuple[int, int]], decodes: bool
) -> None:
    fmt = LevelFormat(64, 32, 3, 2, window)
    pairs.assert_batch_agrees(pairs.kernels_of(cpu.create(), fmt), fmt, spans, decodes=decodes)


@pytest.mark.parametrize("window", [Window(), Window(1, 2)], ids=str)
def test_a_result_does_not_depend_on_threads(backend: cpu.CpuBackend, window: Window) -> None:
    fmt = LevelFormat(64, 32, 3, 2, window)
    ours, _ = pairs.kernels_of(backend, fmt)
    k, v = (random_rows(seed, 999, pairs.HEADS, 64).half() for seed in (1, 2))
    pool, q = filled(ours, fmt, k[:998], v[:998]), random_rows(3, 1, 8, 64)
    add_row(pool, 998, k[998], v[998])
    backend.threads = 1
    alone = ours.attend(0, pool, one_span(998, 1, 31), Rows(q))
    for threads in (2, 7):
        backend.threads = threads
        assert pairs.relative(ours.attend(0, pool, one_span(998, 1, 31), Rows(q)), alone) < 1e-6
