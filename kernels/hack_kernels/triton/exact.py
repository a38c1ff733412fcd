"""Prefill without homomorphic arithmetic: exact attention in BF16 by torch, for GPUs whose INT8 does not pay there.

A chunk's own rows are attended to unquantized. Pages of earlier chunks exist as codes only and are dequantized. So the
result depends on where a prompt was cut, unlike in the homomorphic kernel. Lengths are read on the host, once a call,
because torch needs them there; a prefill takes long enough to hide it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from hack_kernels.base import Planes, Pool, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.quantize import Quantized, unpack
from hack_kernels.triton.exchange import export


def attn_prefill(fmt: HackFormat, pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `PageKernels.attend` of a prompt, in BF16, or in q's type where that has 16 bits."""
    dtype = q.dtype if q.dtype.itemsize == 2 else torch.bfloat16
    out = torch.empty_like(q)
    where = torch.stack((spans.starts, spans.counts, spans.offsets, spans.slots)).tolist()
    for b, (start, count, offset, slot) in enumerate(zip(*where, strict=True)):
        rows, filled = slice(offset, offset + count), start % fmt.page_tokens
        early = dequantized(fmt, pool.planes, spans.table[b, : start // fmt.page_tokens])
        keys, values = (
            torch.cat((cached, own[slot, :, :filled].to(dtype), new[rows].transpose(0, 1).to(dtype)), dim=1)
            for cached, own, new in zip((x.to(dtype) for x in early), (pool.open_k, pool.open_v), (k, v), strict=True)
        )
        query = q[rows].transpose(0, 1).to(dtype)
        mask = causal_lower_right(count, keys.shape[1])
        attended = scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1).to(q.dtype)
    return out


def dequantized(fmt: HackFormat, pages: Planes, page_ids: Tensor) -> tuple[Tensor, Tensor]:
    """K^ and V^ [Hkv, tokens, D] FP32 of some pages in order."""
    wire = export(fmt, pages, page_ids)
    k = unpack(wire["k_codes"], fmt.k_bits, axis=-2).unflatten(-1, (fmt.k_groups, fmt.k_partition))
    v = unpack(wire["v_codes"], fmt.v_bits, axis=-1)
    k_hat = Quantized(k, wire["k_min"], wire["k_scale"]).dequantize().flatten(-2)
    v_hat = Quantized(v, wire["v_min"], wire["v_scale"]).dequantize().transpose(-1, -2)
    return k_hat.flatten(1, 2), v_hat.flatten(1, 2)
