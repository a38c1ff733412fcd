"""Numbers in one buffer: what comes out is what went in, and every list begins where kernels expect it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hackkv.codec import Batch, Span
from hackkv.packing import STRIDE, packed, table_of

CPU = torch.device("cpu")
numbers = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(numbers, max_size=70), min_size=1, max_size=5))
def test_every_list_comes_out_and_begins_at_a_stride(lists: list[list[int]]) -> None:
    found = packed(lists, CPU)
    assert [each.tolist() for each in found] == lists
    (storage,) = {each.untyped_storage().data_ptr() for each in found}
    assert all((each.data_ptr() - storage) % (8 * STRIDE) == 0 for each in found if len(each))


@given(st.lists(st.lists(numbers, min_size=1, max_size=70), min_size=1, max_size=5))
def test_a_table_has_whole_strides(rows: list[list[int]]) -> None:
    table = table_of(rows).reshape(len(rows), -1)
    assert table.shape[1] % STRIDE == 0
    assert [row[: len(each)].tolist() for row, each in zip(table, rows, strict=True)] == rows
    assert not any(row[len(each) :].any() for row, each in zip(table, rows, strict=True))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=9), st.booleans())
def test_strides_and_alignment_of_a_decode_batch_are_those_of_every_other(held: list[int], again: bool) -> None:
    """So Triton, which compiles anew for other divisibilities of a pointer or a stride, does not."""
    spans = [Span(slot, rows, 1, tuple(range(rows // 32 + 1))) for slot, rows in enumerate(held)]
    batch = Batch.of(spans, 32, last=Batch.of(spans, 32) if again else None, more=[[5] * len(spans)])
    where = batch.where
    assert [tensor.tolist() for tensor in (where.starts, *batch.more)] == [held, [5] * len(spans)]
    assert where.table.stride() == (where.table.shape[1], 1)
    assert where.table.shape[1] % STRIDE == 0
    offsets = [tensor.storage_offset() for tensor in (where.starts, where.counts, where.slots, where.table)]
    assert all(offset % STRIDE == 0 for offset in offsets)
    if not again:
        assert len({tensor.untyped_storage().data_ptr() for tensor in (where.starts, where.table, *batch.more)}) == 1
