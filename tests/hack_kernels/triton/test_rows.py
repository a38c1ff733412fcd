"""Decode over FP16 and BF16 rows, as Triton interprets it, against FP64 attention."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.base import Pool, Rows
from hack_kernels.hack_format import HackFormat
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat

from tests.hack_kernels.triton.batches import decode_batch, largest_error

pytest.importorskip("triton")

from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.rows import attn_decode_rows
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


def test_a_backend_takes_the_kernel_where_it_loses_nothing() -> None:
    """16-bit queries of decode; FP32 ones are the definition's to the bit."""
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
