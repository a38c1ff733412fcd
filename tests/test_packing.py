"""Numbers in one buffer come out as they went in, and every list begins where kernels expect it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hackkv.batch import Batch, Span
from hackkv.packing import STRIDE, on_device, packed, table_of

CPU, META = torch.device("cpu"), torch.device("meta")
numbers = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(numbers, max_size=70), min_size=1, max_size=5))
def test_every_list_lies_in_the_buffer_and_begins_at_a_stride(lists: list[list[int]]) -> None:
    buffer, places = packed(lists)
    assert [buffer[place].tolist() for place in places] == lists
    assert all(place.start % STRIDE == 0 for place in places)
    assert [each.tolist() for each in on_device(lists, CPU)] == lists


@given(st.lists(st.lists(numbers, max_size=70), min_size=1, max_size=5))
def test_a_table_has_whole_strides(rows: list[list[int]]) -> None:
    table = table_of(rows).reshape(len(rows), -1)
    assert table.shape[1] % STRIDE == 0 < table.shape[1]
    assert [row[: len(each)].tolist() for row, each in zip(table, rows, strict=True)] == rows
    assert not any(row[len(each) :].any() for row, each in zip(table, rows, strict=True))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=9), st.booleans())
def test_strides_and_alignment_of_a_decode_batch_are_those_of_every_other(held: list[int], again: bool) -> None:
    """Triton compiles anew if the divisibility of a pointer or a stride changes. Here it never changes."""
    spans = [Span(slot, rows, 1, tuple(range(rows // 32 + 1))) for slot, rows in enumerate(held)]
    batch = Batch.of(spans, 32, META, Batch.of(spans, 32, META) if again else None, [[5] * len(spans)])
    where = batch.where
    tensors = [where.starts, where.counts, where.offsets, where.slots, where.table, *batch.more]
    assert {tensor.device for tensor in tensors} == {META}
    assert all(tensor.storage_offset() % STRIDE == 0 for tensor in tensors)
    assert where.table.stride() == (where.table.shape[1], 1)
    assert where.table.shape[1] % STRIDE == 0
    copies = [where.starts.untyped_storage(), batch.more[0].untyped_storage()]
    assert copies[0].nbytes() == copies[1].nbytes() >= 8 * 2 * STRIDE, "they came in one copy"
