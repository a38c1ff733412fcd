"""Compares a backend's kernels for pages of levels with the definition. Every backend must pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hack_kernels.base import Backend, Planes, Pool, Rows, Spans
from hack_kernels.level_format import Feedback, LevelFormat, LevelKernels, Scales, on_grid
from hack_kernels.pools import new_pool
from hack_kernels.reference.levels import LevelReference
from hack_kernels.rowwise import Rowwise
from hack_kernels.window import Window
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.test_levels import feedback_of, fill_slot, filled, metrics, one_span

HEADS = 2
LAYER = 3
WINDOWED = [LevelFormat(64, 32, 3, 2, Window(1, 2)), LevelFormat(96, 64, 4, 4, Window(2, 1))]
NARROW = [
    LevelFormat(64, 32, 3, 2, Window(1, 2), Scales.FP8),
    LevelFormat(80, 64, 2, 2, scales=Scales.FP8),
    LevelFormat(128, 128, 4, 4, scales=Scales.FP8),
    LevelFormat(64, 64, 8, 3, scales=Scales.FP8),
]
"""Formats with scales of one byte."""
WINDOWS = [Window(s, r) for s in range(3) for r in range(3) if s + r < 4]
Pair = tuple[LevelKernels, LevelKernels]


def kernels_of(backend: Backend, fmt: LevelFormat, feedback: Feedback | None = None) -> Pair:
    """The kernels of the backend, which must have some, and the definition."""
    both: Pair = (backend.kernels_for(fmt, LevelReference), LevelReference(fmt, CPU))
    assert both[0].served_by == backend.name
    for each in both if feedback is not None else ():
        assert feedback is not None
        each.set_feedback(0, feedback)
    return both


def assert_same(ours: Planes, theirs: Planes) -> None:
    """Assert that names, their order, and bytes are equal."""
    assert list(ours) == list(theirs)
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


def relative(a: Tensor, b: Tensor) -> float:
    """The relative distance of `a` from `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_bytes_agree(both: Pair, fmt: LevelFormat, k: Tensor, v: Tensor) -> None:
    """Assert that full pages of rows [n, Hkv, D], sealed and exported, have equal bytes."""
    ids = torch.arange(k.shape[0] // fmt.page_tokens).roll(1)
    assert_same(*(each.export(filled(each, fmt, k, v), ids) for each in both))


def assert_extremes_agree(backend: Backend, fmt: LevelFormat, scale: float, feedback: Feedback | None) -> None:
    """Assert equal bytes for rows times `scale`, with rows of nearly the largest values. Some scales take integers,
    whose quotients are often integers too."""
    rows = random_rows(3, 2, 2 * fmt.page_tokens, HEADS, fmt.head_dim)
    wide = (rows.round() if scale in (300.0, 2.0**-24) else rows) * (65504 if scale == torch.inf else scale)
    k, v = wide.clamp(-65504, 65504).half()
    k[7], v[9] = 58950, -58950
    k[7, :, :3], v[9, :, 60:] = 65504, 65504
    assert_bytes_agree(kernels_of(backend, fmt, feedback), fmt, k, v)


def largest_feedback(head_dim: int) -> Feedback:
    """Gains of random signs, some of them and the sums of most channels as large as they may be."""
    gains = (100 * random_rows(6, HEADS, head_dim, head_dim)).triu(1)
    return Feedback(on_grid(gains), torch.ones(HEADS, head_dim))


def assert_attention_agrees(
    both: Pair, fmt: LevelFormat, group: int, begins: Sequence[int], heads: int = HEADS
) -> None:
    """Assert that outputs agree for prompts whose rows begins[i].. are new (negative: from the end) and for decode of
    the last row. They may differ a little: weights near a tie may be rounded either way."""
    pages = fmt.window.pages + 1
    n = pages * fmt.page_tokens + 5
    k, v = (random_rows(seed, n, heads, fmt.head_dim).half() for seed in (1, 2))
    q = random_rows(3, n, heads * group, fmt.head_dim)
    for begin in (begin % n for begin in begins):
        outs = []
        for each in both:
            pool, rows = filled(each, fmt, k, v), slice(begin, n)
            fill_slot(pool, 0, k[:begin], v[:begin])
            outs.append(each.attend(0, pool, one_span(begin, n - begin, pages), Rows(q[rows], k[rows], v[rows])))
        assert relative(*outs) < 2e-3
    decoded = [each.attend(0, filled(each, fmt, k, v), one_span(n - 1, 1, pages), Rows(q[-1:])) for each in both]
    assert relative(*decoded) < 2e-3


def assert_feedback_goes_by_layer_and_head(both: Pair, fmt: LevelFormat) -> None:
    """Assert that bytes agree for all four heads, for a pool of heads 2 and 3, and for a layer without feedback."""
    k, v = (random_rows(seed, 1, 4, fmt.page_tokens, fmt.head_dim).half() for seed in (1, 2))
    zero = torch.tensor([0])
    for layer, first in ((LAYER, 0), (LAYER, 2), (LAYER + 1, 0)):
        made = []
        for each in both:
            each.set_feedback(LAYER, feedback_of(metrics(5, 4, fmt.head_dim)))
            pool = new_pool(fmt, each, CPU, 1, 1, range(first, 4))
            each.seal(layer, pool, zero, zero, k[:, first:], v[:, first:])
            made.append(each.export(pool, zero))
        assert_same(*made)


def assert_pages_move(both: Pair, fmt: LevelFormat) -> None:
    """Assert that pages move from the definition to the backend and back bit-exactly, whole and by ranges of heads."""
    ours, theirs = both
    k, v = (random_rows(seed, 3 * fmt.page_tokens, HEADS, fmt.head_dim).half() for seed in (10, 11))
    wire = theirs.export(filled(theirs, fmt, k, v), torch.tensor([2, 0, 1]))
    ids, pools = torch.tensor([4, 1, 3]), list[Pool]()
    for _ in range(2):
        pools.append(new_pool(fmt, ours, CPU, 5, 1, range(HEADS)))
    ours.install(pools[0], ids, wire)
    for head in range(HEADS):
        ours.install(pools[1].heads(head, 1), ids, {name: plane[head : head + 1] for name, plane in wire.items()})
    for pool in pools:
        assert_same(ours.export(pool, ids), wire)


def assert_batch_agrees(both: Pair, fmt: LevelFormat, pairs: Sequence[tuple[int, int]], *, decodes: bool) -> None:
    """Assert that outputs agree for a batch of sequences of (rows before, new rows). In decode each has one new row."""
    pi = fmt.page_tokens
    starts, counts = [start for start, _ in pairs], [1 if decodes else count for _, count in pairs]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    k, v = (random_rows(seed, max(ends), HEADS, fmt.head_dim).half() for seed in (1, 2))
    q, width = random_rows(3, sum(counts), 2 * HEADS, fmt.head_dim), max(ends) // pi + 1
    where = torch.tensor([*itertools.accumulate(counts[:-1], initial=0)])
    table = torch.arange(len(pairs) * width).view(len(pairs), width)
    spans = Spans(torch.tensor(starts), torch.tensor(counts), where, table, torch.arange(len(pairs)).flip(0))
    new = [torch.cat([x[start:end] for start, end in zip(starts, ends, strict=True)]) for x in (k, v)]
    outs = []
    for each in both:
        pool = new_pool(fmt, each, CPU, len(pairs) * width, len(pairs), range(HEADS))
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for page in range(end // pi):
                rows = [x[page * pi :][:pi].transpose(0, 1)[None].contiguous() for x in (k, v)]
                each.seal(0, pool, table[b, page : page + 1], torch.tensor([page * pi]), rows[0], rows[1])
            fill_slot(pool, len(pairs) - 1 - b, k[:start], v[:start])
        if decodes:
            Rowwise().append(pool, spans, new[0], new[1], torch.zeros(len(pairs), dtype=torch.bool))
        outs.append(each.attend(0, pool, spans, Rows(q) if decodes else Rows(q, *new)))
    assert bool(outs[0].isfinite().all())
    assert relative(*outs) < 2e-3
