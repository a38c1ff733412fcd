"""Pages of levels, with kernels interpreted by Triton: equal bytes to the definition, and attention that agrees."""

from __future__ import annotations

import itertools

import pytest
import torch
from hack_kernels import level_format
from hack_kernels.base import Rows
from hack_kernels.level_format import LEVEL_BITS, PAGE_TOKENS, LevelFormat, Scales
from hack_kernels.window import Window
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hack_kernels import level_pairs as pairs
from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.test_levels import feedback_of, filled, metrics, one_span

pytest.importorskip("triton")

from hack_kernels.triton.backend import Prefill, TritonBackend
from hack_kernels.triton.level_layout import level_layout, levels_from_wire, levels_to_wire
from hack_kernels.triton.levels import NARROWEST
from hack_kernels.triton.split import Workspace

BACKEND = TritonBackend(CPU, Prefill.HOMOMORPHIC)
HEAD_DIMS = [dim for dim in level_format.HEAD_DIMS if dim >= NARROWEST]
WIDTHS = [(64, 32, k, v) for k, v in itertools.product(LEVEL_BITS, LEVEL_BITS)]
SHAPES = [(d, pi, 3, 3) for d, pi in itertools.product(HEAD_DIMS, PAGE_TOKENS)]
FED = [
    *(LevelFormat(*s) for s in ((64, 32, 2, 3), (80, 32, 3, 3), (64, 64, 4, 4), (128, 32, 3, 2))),
    LevelFormat(64, 32, 3, 2, scales=Scales.FP8),
]
FORMATS = [
    LevelFormat(64, 32, 3, 2),
    *(LevelFormat(*s) for s in (*SHAPES, *WIDTHS, (80, 64, 4, 4), (128, 64, 4, 4))),
    *pairs.NARROW,
]


@pytest.mark.parametrize(("fmt", "fed"), [*((fmt, False) for fmt in FORMATS), *((fmt, True) for fmt in FED)], ids=str)
def test_bytes_equal_the_definition(fmt: LevelFormat, fed: bool) -> None:
    feedback = feedback_of(metrics(4, 1, fmt.head_dim)) if fed else None
    k, v = (random_rows(seed, fmt.page_tokens, 1, fmt.head_dim).half() for seed in (1, 2))
    pairs.assert_bytes_agree(pairs.kernels_of(BACKEND, fmt, feedback), fmt, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 300.0, torch.inf])
@pytest.mark.parametrize(("bits", "scales"), [*((bits, Scales.FP16) for bits in LEVEL_BITS), (2, Scales.FP8)])
def test_bytes_equal_the_definition_at_extreme_scales(bits: int, scales: Scales, scale: float) -> None:
    for fed in (None, feedback_of(metrics(5, pairs.HEADS, 64))):
        pairs.assert_extremes_agree(BACKEND, LevelFormat(64, 32, bits, bits, scales=scales), scale, fed)


@pytest.mark.slow
def test_feedback_goes_by_the_layer_and_the_heads_of_the_model() -> None:
    fmt = LevelFormat(64, 32, 2, 2)
    pairs.assert_feedback_goes_by_layer_and_head(pairs.kernels_of(BACKEND, fmt), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_move_between_the_definition_and_triton(fmt: LevelFormat) -> None:
    pairs.assert_pages_move(pairs.kernels_of(BACKEND, fmt), fmt)


@pytest.mark.parametrize(("fmt", "group"), list(zip([*pairs.WINDOWED, *FORMATS], itertools.cycle((3, 1, 8)))), ids=str)
def test_attention_agrees_with_the_definition(fmt: LevelFormat, group: int) -> None:
    begins = (-5,) if fmt.window.pages > 1 else (-7, -fmt.page_tokens - 7)
    pairs.assert_attention_agrees(pairs.kernels_of(BACKEND, fmt), fmt, group, begins, heads=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_and_outputs_have_the_models_type(dtype: torch.dtype) -> None:
    fmt = LevelFormat(64, 32)
    k, v = (random_rows(seed, 70, 1, 64).half() for seed in (1, 2))
    q, outs = random_rows(3, 1, 2, 64).to(dtype), []
    for each in pairs.kernels_of(BACKEND, fmt):
        pool = filled(each, fmt, k, v)
        outs.append(each.attend(0, pool, one_span(69, 1, 2), Rows(q)))
    assert outs[0].dtype is dtype
    assert pairs.relative(*outs) < 2 * torch.finfo(dtype).eps


@pytest.mark.slow
@settings(max_examples=12)
@example(window=Window(1, 1), spans=[(0, 1), (33, 1), (100, 1), (140, 1)], decodes=True)
@example(window=Window(2, 1), spans=[(33, 70), (0, 40)], decodes=False)
@given(
    window=st.sampled_from(pairs.WINDOWS),
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=3),
    decodes=st.booleans(),
)
def test_windows_agree_with_the_definition_for_any_batch(
    window: Window, spans: list[tuple[int, int]], decodes: bool
) -> None:
    fmt = LevelFormat(64, 32, 3, 2, window)
    pairs.assert_batch_agrees(pairs.kernels_of(BACKEND, fmt), fmt, spans, decodes=decodes)


@pytest.mark.parametrize("programs", [40, 5, 1])
def test_programs_share_the_exact_pages_of_a_window(programs: int) -> None:
    """With 40 programs most of them hold a part of an exact page's cost, but read no page."""
    fmt = LevelFormat(64, 32, 3, 2, Window(1, 2))
    backend = TritonBackend(CPU, Prefill.HOMOMORPHIC)
    backend.workspace = Workspace(CPU, programs)
    pairs.assert_batch_agrees(pairs.kernels_of(backend, fmt), fmt, [(200, 1), (0, 1), (70, 1)], decodes=True)


def test_any_bytes_survive_the_way_there_and_back() -> None:
    for d, pi, k, v, scales in itertools.product(HEAD_DIMS, PAGE_TOKENS, LEVEL_BITS, LEVEL_BITS, Scales):
        fmt = LevelFormat(d, pi, k, v, scales=scales)
        generator = torch.Generator().manual_seed(k + 10 * v)
        wire = {
            plane.name: torch.randint(
                0, 255, (2, *plane.shape, plane.dtype.itemsize), dtype=torch.uint8, generator=generator
            )
            .view(plane.dtype)
            .squeeze(-1)
            for plane in fmt.planes
        }
        back = levels_to_wire(fmt, levels_from_wire(fmt, wire))
        assert all(torch.equal(back[name].view(torch.uint8), plane.view(torch.uint8)) for name, plane in wire.items())


def test_a_record_of_a_preset_is_as_large_as_the_page_on_the_wire() -> None:
    for d, bits, scales in itertools.product((64, 128), (2, 3, 4, 8), Scales):
        fmt = LevelFormat(d, 64, bits, bits, scales=scales)
        assert level_layout(fmt).nbytes == fmt.page_bytes
