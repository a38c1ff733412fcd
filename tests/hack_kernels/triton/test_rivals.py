"""What homomorphic decode is measured against computes the right thing too."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.base import HackFormat
from hack_kernels.quantize import quantize_k, quantize_v
from torch import Tensor

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch

pytest.importorskip("triton")

from hack_kernels.triton.dequantize import attn_decode_dequantized
from hack_kernels.triton.rows import attn_decode_rows
from hack_kernels.triton.split import Workspace

FORMATS = [
    HackFormat(64, 32),
    HackFormat(96, 32, k_bits=4),
    HackFormat(96, 64),
    HackFormat(128, 128, v_bits=4),
    HackFormat(256, 64, k_bits=4, v_bits=4),
]


def workspace() -> Workspace:
    return Workspace(torch.device("cpu"), 3)


def exact(batch: DecodeBatch, k: Tensor, v: Tensor) -> Tensor:
    """FP64 attention over sealed pages of rows k, v [N, Hkv, Π, D] and the own page; one KV head."""
    outs = []
    for b, cached in enumerate(batch.spans.starts.tolist()):
        full, rest = divmod(cached, batch.fmt.page_tokens)
        ids, slot = batch.spans.table[b, :full], batch.spans.slots[b]
        keys, values = (
            torch.cat((pages[ids, 0].flatten(0, 1), own[slot, 0, : rest + 1])).double()
            for pages, own in ((k, batch.open_k), (v, batch.open_v))
        )
        scores = batch.q[b].double() @ keys.T / batch.fmt.head_dim**0.5
        outs.append(scores.softmax(-1) @ values)
    return torch.stack(outs)


def reconstructed(batch: DecodeBatch) -> tuple[Tensor, Tensor]:
    """K^ and V^ [N, Hkv, Π, D] FP64 of the sealed pages."""
    positions = torch.arange(batch.fmt.page_tokens)
    k_hat, v_hat = torch.empty_like(batch.k, dtype=torch.float64), torch.empty_like(batch.v, dtype=torch.float64)
    for i, (k, v) in enumerate(zip(batch.k, batch.v, strict=True)):
        k_codes = quantize_k(batch.fmt, 0, k.transpose(0, 1), positions)
        k_hat[i] = k_codes.dequantize(torch.float64).flatten(2).transpose(0, 1)
        v_hat[i] = quantize_v(batch.fmt, 0, v.transpose(0, 1), positions).dequantize(torch.float64).transpose(1, 2)
    return k_hat, v_hat


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dequantized_attention_equals_fp64_on_the_reconstructed_rows(fmt: HackFormat) -> None:
    """To what FP16 queries, values and weights allow."""
    batch = decode_batch(fmt, [fmt.page_tokens - 1, 3 * fmt.page_tokens], heads=1, group=3)
    rows = (batch.open_k, batch.open_v, batch.spans, batch.q, workspace())
    assert largest_error(attn_decode_dequantized(fmt, batch.pages, *rows), exact(batch, *reconstructed(batch))) < 3e-3


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_rows_equals_fp64(fmt: HackFormat, dtype: torch.dtype) -> None:
    batch = decode_batch(fmt, [3 * fmt.page_tokens + 1, 0], heads=1, group=3)
    k, v = batch.k.to(dtype), batch.v.to(dtype)
    out = attn_decode_rows(k, v, batch.open_k, batch.open_v, batch.spans, batch.q, workspace())
    assert largest_error(out, exact(batch, k, v)) < 3 * torch.finfo(dtype).eps


def test_rows_of_another_type_are_refused() -> None:
    batch = decode_batch(HackFormat(64, 32), [40], heads=1, group=1)
    with pytest.raises(ValueError, match=r"k is .* torch.float32"):
        attn_decode_rows(
            batch.k.float(), batch.v.float(), batch.open_k, batch.open_v, batch.spans, batch.q, workspace()
        )
