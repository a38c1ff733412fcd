"""Pages of levels in C++, under every instruction path: bytes of the definition, attention that agrees with it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import Planes, Pool, Rows, Spans, new_pool
from hack_kernels.level_format import HEAD_DIMS, LEVEL_BITS, PAGE_TOKENS, Feedback, LevelFormat, LevelKernels
from hack_kernels.reference.levels import LevelReference
from hack_kernels.window import Window
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hack_kernels.cpu.cases import LAYER, relative
from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.test_levels import add_row, feedback_of, fill_slot, filled, metrics, one_span

HEADS = 2
SHAPES = [(d, pi, 3, 2) for d, pi in itertools.product(HEAD_DIMS, PAGE_TOKENS)]
WINDOWED = [LevelFormat(64, 32, 3, 2, Window(1, 2)), LevelFormat(96, 64, 4, 4, Window(2, 1))]
FORMATS = [LevelFormat(*s) for s in (*SHAPES, *((64, 32, k, v) for k, v in itertools.product(LEVEL_BITS, LEVEL_BITS)))]


def kernels_of(backend: cpu.CpuBackend, fmt: LevelFormat, feedback: Feedback | None = None) -> tuple[LevelKernels, ...]:
    """Those of C++, which must be there, and the definition."""
    both: tuple[LevelKernels, ...] = (backend.kernels_for(fmt, LevelReference), LevelReference(fmt, CPU))
    assert both[0].served_by == "cpu"
    for each in both if feedback is not None else ():
        assert feedback is not None
        each.set_feedback(0, feedback)
    return both


def assert_same(ours: Planes, theirs: Planes) -> None:
    assert list(ours) == list(theirs)
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_equal_the_definition(backend: cpu.CpuBackend, fmt: LevelFormat, fed: bool) -> None:
    feedback = feedback_of(metrics(4, HEADS, fmt.head_dim)) if fed else None
    k, v = (random_rows(seed, 3 * fmt.page_tokens, HEADS, fmt.head_dim).half() for seed in (1, 2))
    ids = torch.tensor([2, 0, 1])
    assert_same(*(each.export(filled(each, fmt, k, v), ids) for each in kernels_of(backend, fmt, feedback)))


@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 2.0**-14, 1e-3, 300.0, 15000.0, 60000.0, torch.inf])
def test_bytes_equal_the_definition_at_extreme_scales(backend: cpu.CpuBackend, scale: float) -> None:
    """Also of integers, whose quotients are often integers too, and of rows of nearly the largest values."""
    feedback = feedback_of(metrics(5, HEADS, 64))
    rows = random_rows(3, 2, 64, HEADS, 64)
    wide = (rows.round() if scale in (300.0, 2.0**-24) else rows) * (65504 if scale == torch.inf else scale)
    k, v = wide.clamp(-65504, 65504).half()
    k[7], v[9] = 58950, -58950
    k[7, :, :3], v[9, :, 60:] = 65504, 65504
    for bits in LEVEL_BITS:
        fmt = LevelFormat(64, 32, bits, bits)
        for fed in (None, feedback):
            both = kernels_of(backend, fmt, fed)
            assert_same(*(each.export(filled(each, fmt, k, v), torch.tensor([0, 1])) for each in both))


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("fmt", [*FORMATS[:: len(PAGE_TOKENS) - 1], *WINDOWED], ids=str)
def test_attention_agrees_with_the_definition(backend: cpu.CpuBackend, fmt: LevelFormat, group: int) -> None:
    """Prompts that begin inside pages and at their edges, and decode; weights near a tie may turn either way."""
    pages = fmt.window.pages + 1
    pi, n = fmt.page_tokens, pages * fmt.page_tokens + 5
    k, v = (random_rows(seed, n, HEADS, fmt.head_dim).half() for seed in (1, 2))
    q = random_rows(3, n, HEADS * group, fmt.head_dim)
    both = kernels_of(backend, fmt)
    for begin in (0, 3, pi - 1, pi, pi + 2, pages * pi - 1, n - 1):
        outs = []
        for each in both:
            pool, rows = filled(each, fmt, k, v), slice(begin, n)
            fill_slot(pool, 0, k[:begin], v[:begin])
            outs.append(each.attend(0, pool, one_span(begin, n - begin, pages), Rows(q[rows], k[rows], v[rows])))
        assert relative(*outs) < 2e-3
    decoded = [each.attend(0, filled(each, fmt, k, v), one_span(n - 1, 1, pages), Rows(q[-1:])) for each in both]
    assert relative(*decoded) < 2e-3


def test_feedback_goes_by_the_layer_and_the_heads_of_the_model(backend: cpu.CpuBackend) -> None:
    fmt, zero = LevelFormat(64, 32, 2, 2), torch.tensor([0])
    both = kernels_of(backend, fmt)
    k, v = (random_rows(seed, 1, 4, 32, 64).half() for seed in (1, 2))
    for layer, first in ((LAYER, 0), (LAYER, 2), (LAYER + 1, 0)):
        made = []
        for each in both:
            each.set_feedback(LAYER, feedback_of(metrics(5, 4, 64)))
            pool = new_pool(fmt, each, CPU, 1, 1, range(first, 4))
            each.seal(layer, pool, zero, zero, k[:, first:], v[:, first:])
            made.append(each.export(pool, zero))
        assert_same(*made)


@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_pages_move_between_the_definition_and_cpp(backend: cpu.CpuBackend, bits: int) -> None:
    """Bit-exact, whole and by ranges of heads."""
    fmt = LevelFormat(96, 64, bits, bits)
    ours, theirs = kernels_of(backend, fmt)
    k, v = (random_rows(seed, 192, HEADS, 96).half() for seed in (10, 11))
    wire = theirs.export(filled(theirs, fmt, k, v), torch.tensor([2, 0, 1]))
    ids, pools = torch.tensor([4, 1, 3]), list[Pool]()
    for _ in range(2):
        pools.append(new_pool(fmt, ours, CPU, 5, 1, range(HEADS)))
    ours.install(pools[0], ids, wire)
    for head in range(HEADS):
        ours.install(pools[1].heads(head, 1), ids, {name: plane[head : head + 1] for name, plane in wire.items()})
    for pool in pools:
        assert_same(ours.export(pool, ids), wire)


@settings(max_examples=60, deadline=None)
@given(window=st.sampled_from([Window(s, r) for s in range(3) for r in range(3) if s + r < 4]), data=st.data())
def test_windows_agree_with_the_definition_for_any_batch(window: Window, data: st.DataObject) -> None:
    """Sequences of any lengths side by side, of which the last rows are new: several in prefill, one in decode."""
    fmt, ours = LevelFormat(64, 32, 3, 2, window), cpu.create()
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 250), st.integers(1, 80)), min_size=1, max_size=3))
    decodes = data.draw(st.booleans())
    starts, counts = [start for start, _ in pairs], [1 if decodes else count for _, count in pairs]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    k, v = (random_rows(seed, max(ends), HEADS, 64).half() for seed in (1, 2))
    q, width = random_rows(3, sum(counts), 2 * HEADS, 64), max(ends) // 32 + 1
    where = torch.tensor([*itertools.accumulate(counts[:-1], initial=0)])
    table = torch.arange(len(pairs) * width).view(len(pairs), width)
    spans = Spans(torch.tensor(starts), torch.tensor(counts), where, table, torch.arange(len(pairs)).flip(0))
    new = [torch.cat([x[start:end] for start, end in zip(starts, ends, strict=True)]) for x in (k, v)]
    outs = []
    for each in (ours.kernels_for(fmt, LevelReference), LevelReference(fmt, CPU)):
        pool = new_pool(fmt, each, CPU, len(pairs) * width, len(pairs), range(HEADS))
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for page in range(end // 32):
                rows = [x[page * 32 :][:32].transpose(0, 1)[None].contiguous() for x in (k, v)]
                each.seal(0, pool, table[b, page : page + 1], torch.tensor([page * 32]), rows[0], rows[1])
            fill_slot(pool, len(pairs) - 1 - b, k[:start], v[:start])
        if decodes:
            ours.rows.append(pool, spans, new[0], new[1], torch.zeros(len(pairs), dtype=torch.bool))
        outs.append(each.attend(0, pool, spans, Rows(q) if decodes else Rows(q, *new)))
    assert bool(outs[0].isfinite().all())
    assert relative(*outs) < 2e-3


@pytest.mark.parametrize("window", [Window(), Window(1, 2)], ids=str)
def test_a_result_does_not_depend_on_threads(backend: cpu.CpuBackend, window: Window) -> None:
    fmt = LevelFormat(64, 32, 3, 2, window)
    ours, _ = kernels_of(backend, fmt)
    k, v = (random_rows(seed, 999, HEADS, 64).half() for seed in (1, 2))
    pool, q = filled(ours, fmt, k[:998], v[:998]), random_rows(3, 1, 8, 64)
    add_row(pool, 998, k[998], v[998])
    backend.threads = 1
    alone = ours.attend(0, pool, one_span(998, 1, 31), Rows(q))
    for threads in (2, 7):
        backend.threads = threads
        assert relative(ours.attend(0, pool, one_span(998, 1, 31), Rows(q)), alone) < 1e-6
