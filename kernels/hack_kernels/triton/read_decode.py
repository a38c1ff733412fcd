"""Decode over pages whose rows become FP16 in registers, 16 at a time, before they are multiplied: what is the same for
all their formats."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.triton.float_query import ROWS_AT_ONCE, product, rounded_query, weights_of
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import ALL_REGISTERS, PageReader, paged_launch
from hack_kernels.triton.read_layout import ReadLayout
from hack_kernels.triton.split import Workspace


@triton.jit
def add_read_pages(
    state,
    record,
    valid,
    query,
    SCORES: tl.constexpr,
    VALUES: tl.constexpr,
    LAYOUT: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """W pages at `record` [W] added to the running softmax, as `rows.add_row_pages`.

    SCORES(record, first, query, LAYOUT, W, N) gives the scores FP32 [W, 16, N] of 16 rows of K from `first` on.
    VALUES(record, row, channel, query, LAYOUT) gives 8 rows of V at 16 channels, FP16 [W, 8, 16].

    Formats read eight rows at a time: each lane of a warp then has some channels of one row, and of its page only.
    What all rows of a page share is loaded again for every sixteen rows, since registers could not keep it.
    """
    eight = tl.arange(0, 8)
    for first in tl.range(0, LAYOUT.page_tokens, ROWS_AT_ONCE, num_stages=1, disable_licm=True):
        top, weight, out = state
        score = SCORES(record, first, query, LAYOUT, W, N)
        new_top, kept, p, weight = weights_of(top, weight, score, valid, W, N)
        added = ()
        for m in tl.static_range(LAYOUT.head_dim // 16):
            channel = m * 16 + tl.arange(0, 16)
            upper = VALUES(record, first + eight, channel, query, LAYOUT)
            lower = VALUES(record, first + 8 + eight, channel, query, LAYOUT)
            v = tl.reshape(tl.permute(tl.join(upper, lower), (0, 2, 3, 1)), (W, 16, ROWS_AT_ONCE))
            added = added + (product(v, p, out[m] * kept[:, None, :]),)
        state = (new_top, weight, added)
    return state


def read_decode_launch(
    add: Any,
    layout: ReadLayout,
    pool: Pool,
    spans: Spans,
    q: Tensor,
    out: Tensor,
    workspace: Workspace,
    tables: Tensor | None = None,
    prepare: Any = rounded_query,
) -> Launch:
    """The launch that writes `out`, with the device functions `prepare` and `add` and the `tables` of
    `paged.decode_kernel`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    records = pool.planes[layout.places[0][0]]
    reader = PageReader(prepare, add, layout, ALL_REGISTERS)
    return paged_launch(reader, records, records, pool, spans, q, out, workspace, tables)
