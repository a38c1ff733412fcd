"""The rival that dequantizes is correct too."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.hack_format import HackFormat
from hack_kernels.philox import Coordinates
from hack_kernels.quantize import quantize_k, quantize_v
from torch import Tensor

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch, largest_error

pytest.importorskip("triton")

from hack_kernels.triton.split import Workspace

from lab.gpu.dequantize import attn_decode_dequantized

FORMATS = [
    HackFormat(64, 32),
    HackFormat(96, 32, k_bits=4),
    HackFormat(96, 64),
    HackFormat(128, 128, v_bits=4),
    HackFormat(256, 64, k_bits=4, v_bits=4),
]


def workspace() -> Workspace:
    return Workspace(torch.device("cpu"), 3)


def reconstructed(batch: DecodeBatch) -> tuple[Tensor, Tensor]:
    """K^ and V^ [N, Hkv, Π, D] FP64 of the sealed pages."""
    where = Coordinates(0, 0, torch.arange(batch.fmt.page_tokens))
    k_hat, v_hat = torch.empty_like(batch.k, dtype=torch.float64), torch.empty_like(batch.v, dtype=torch.float64)
    for i, (k, v) in enumerate(zip(batch.k, batch.v, strict=True)):
        k_codes = quantize_k(batch.fmt, where, k.transpose(0, 1))
        k_hat[i] = k_codes.dequantize(torch.float64).flatten(2).transpose(0, 1)
        v_hat[i] = quantize_v(batch.fmt, where, v.transpose(0, 1)).dequantize(torch.float64).transpose(1, 2)
    return k_hat, v_hat


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dequantized_attention_equals_fp64_on_the_reconstructed_rows(fmt: HackFormat) -> None:
    """The bound is that of FP16 queries, values and weights."""
    batch = decode_batch(fmt, [fmt.page_tokens - 1, 3 * fmt.page_tokens], heads=1, group=3)
    out = attn_decode_dequantized(fmt, batch.pool, batch.spans, batch.q, workspace())
    assert largest_error(out, batch.exact(*reconstructed(batch))) < 3e-3
