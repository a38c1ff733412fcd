"""Sealed pages in prefill whose values are read one by one: numbers in registers, multiplied as TF32.

TF32 holds queries of 16 bits exactly; weights are rounded to it. What a page's codes stand for is the format's to say.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.prefill_tiling import OWN_ROWS, QUERY_ROWS, TILES_AT_ONCE, Tiling
from hack_kernels.triton.quantize import divided

READ_ROWS = tl.constexpr(32)
"""Rows of a page that are multiplied at once."""


@triton.jit
def read_query_rows(q_rows, seen_rows, LAYOUT: tl.constexpr):
    """Where the queries stand: they are read again at every use, as for own pages."""
    return q_rows, seen_rows


@triton.jit
def add_read_page(state, query, record, first_block, VALUES: tl.constexpr, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """A page added to the running softmax, as `prefill_sealed.add_page`.

    VALUES(record, OF_V, row, first, CHANNELS, LAYOUT) are rows of K or of V, at the channels from `first` on: FP32
    [rows, CHANNELS], 0 past D.
    """
    q_rows, seen_rows = query
    M: tl.constexpr = q_rows.shape[0]
    BLOCKS: tl.constexpr = TILING.blocks
    CHANNELS: tl.constexpr = TILING.channels
    STEPS: tl.constexpr = (LAYOUT.head_dim + CHANNELS - 1) // CHANNELS
    for first in tl.range(0, LAYOUT.page_tokens, READ_ROWS, num_stages=1):
        top, total, outputs = state
        row = first + tl.arange(0, READ_ROWS)
        scores = tl.zeros((M, READ_ROWS), tl.float32)
        for step in tl.static_range(STEPS):
            column = step * CHANNELS + tl.arange(0, CHANNELS)
            seen = seen_rows[:, None] & (column < LAYOUT.head_dim)[None, :]
            q = tl.load(q_rows[:, None] + column[None, :], mask=seen, other=0.0).to(tl.float32)
            k = VALUES(record, False, row, step * CHANNELS, CHANNELS, LAYOUT)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="tf32")
        scores = divided(scores, LAYOUT.root)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        updated = ()
        for block in tl.static_range(BLOCKS):
            v = VALUES(record, True, row, (first_block + block) * CHANNELS, CHANNELS, LAYOUT)
            updated = updated + (tl.dot(weights, v, outputs[block] * kept[:, None], input_precision="tf32"),)
        state = (higher, total * kept + tl.sum(weights, axis=1), updated)
    return state


def read_tiling(head_dim: int) -> Tiling:
    """A tiling that does not spill on any GPU up to 128 channels; V's are in order."""
    return Tiling(
        rows=QUERY_ROWS,
        warps=4,
        v_fields=1,
        v_down=TILES_AT_ONCE,
        blocks=-(-head_dim // (16 * TILES_AT_ONCE)),
        parts=1,
        own_rows=OWN_ROWS,
    )
