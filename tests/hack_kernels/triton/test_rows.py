"""Decode over FP16 and BF16 rows, interpreted by Triton, against FP64 attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hack_kernels.base import Pool, Rows
from hack_kernels.hack_format import HackFormat
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import Window

from tests.hack_kernels.triton.batches import decode_batch, largest_error

pytest.importorskip("triton")

from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.rows import RowTiling, attn_decode_rows, rows_launch
from hack_kernels.triton.split import Workspace

FORMATS = [
    HackFormat(64, 32),
    HackFormat(96, 32),
    HackFormat(96, 64),
    HackFormat(128, 128),
    HackFormat(256, 64),
]


def workspace() -> Workspace:
    return Workspace(torch.device("cpu"), 3)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_rows_equals_fp64(fmt: HackFormat, dtype: torch.dtype) -> None:
    batch = decode_batch(fmt, [3 * fmt.page_tokens + 1, 0], heads=1, group=3)
    k, v = batch.k.to(dtype), batch.v.to(dtype)
    out = attn_decode_rows(Pool({"k": k, "v": v}, batch.open_k, batch.open_v), batch.spans, batch.q, workspace())
    assert largest_error(out, batch.exact(k, v)) < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("group", [1, 5, 16, 24])
@pytest.mark.parametrize("programs", [1, 6])
def test_ragged_batches_for_any_group(group: int, programs: int) -> None:
    """A tile is two pages. Lengths are around a page and a tile, or very different, and split into many shares."""
    batch = decode_batch(HackFormat(64, 32), [31, 0, 32, 300, 33, 64], heads=1, group=group)
    pool = Pool({"k": batch.k, "v": batch.v}, batch.open_k, batch.open_v)
    space = Workspace(torch.device("cpu"), programs)
    space.partials(8, 8, 256, 16).fill_(float("nan"))
    out = attn_decode_rows(pool, batch.spans, batch.q.half(), space)
    assert largest_error(out, batch.exact(batch.k, batch.v)) < 3 * torch.finfo(torch.float16).eps
    assert int(space.tickets(1, 1).count_nonzero()) == 0, "tickets must be 0 again for the next launch"


@pytest.mark.parametrize("tiling", [RowTiling(2**11), RowTiling(2**13, 4, 4, 255)], ids=str)
def test_tiles_of_any_size(tiling: RowTiling) -> None:
    """A tile is a part of a page, or several pages."""
    batch = decode_batch(HackFormat(64, 64), [200, 7], heads=1, group=2)
    pool, out = Pool({"k": batch.k, "v": batch.v}, batch.open_k, batch.open_v), torch.empty_like(batch.q)
    rows_launch(pool, batch.spans, batch.q, out, workspace(), tiling).run()
    assert largest_error(out, batch.exact(batch.k, batch.v)) < 3 * torch.finfo(torch.float16).eps


def test_each_head_may_have_its_own_pages_and_its_slot_a_window() -> None:
    fmt, window = HackFormat(64, 32), Window(1, 1)
    batch = decode_batch(fmt, [170, 5, 40], heads=2, group=2)
    table = batch.spans.table[:, None].repeat(1, 2, 1)
    for b, count in enumerate((batch.spans.starts // 32).tolist()):
        table[b, 1, :count] = batch.spans.table[b, :count].roll(1)
    spans = replace(batch.spans, table=table)
    opens = [torch.full((4, 2, 3 * 32, 64), float("nan")).half() for _ in "kv"]
    for slot, start in zip(spans.slots.tolist(), spans.starts.tolist(), strict=True):
        place = slice(window.place(start // 32) * 32, window.place(start // 32) * 32 + 32)
        for own, rows in zip(opens, (batch.open_k, batch.open_v), strict=True):
            own[slot, :, place] = rows[slot]
    pool = Pool({"k": batch.k, "v": batch.v}, opens[0], opens[1], window=window)
    out = attn_decode_rows(pool, spans, batch.q, workspace())
    for head in range(2):
        alone = replace(
            batch,
            open_k=batch.open_k[:, head : head + 1],
            open_v=batch.open_v[:, head : head + 1],
            spans=replace(spans, table=spans.table[:, head]),
            q=batch.q[:, 2 * head : 2 * head + 2],
        )
        expected = alone.exact(*(x[:, head : head + 1] for x in (batch.k, batch.v)))
        assert largest_error(out[:, 2 * head : 2 * head + 2], expected) < 3 * torch.finfo(torch.float16).eps


def test_a_backend_takes_the_kernel_where_it_loses_nothing() -> None:
    """The kernel takes 16-bit queries of decode. FP32 queries have exactly the definition's result."""
    fmt, batch = RowFormat(64, 32), decode_batch(HackFormat(64, 32), [70, 5], heads=1, group=3)
    pool = Pool({"k": batch.k, "v": batch.v}, batch.open_k.nan_to_num(), batch.open_v.nan_to_num())
    definition = RowReference(fmt, torch.device("cpu"))
    kernels = TritonBackend(torch.device("cpu")).kernels_for(fmt, RowReference)
    assert kernels.served_by == "triton"
    for dtype, tolerance in ((torch.float32, 0), (torch.bfloat16, 3 * torch.finfo(torch.bfloat16).eps)):
        rows = Rows(batch.q.to(dtype))
        expected, found = (each.attend(0, pool, batch.spans, rows) for each in (definition, kernels))
        assert found.dtype is dtype
        assert largest_error(found, expected.double()) <= tolerance


def test_rows_of_another_type_are_refused() -> None:
    batch = decode_batch(HackFormat(64, 32), [40], heads=1, group=1)
    pool = Pool({"k": batch.k.float(), "v": batch.v.float()}, batch.open_k, batch.open_v)
    with pytest.raises(ValueError, match=r"k is .* torch.float32"):
        attn_decode_rows(pool, batch.spans, batch.q, workspace())
