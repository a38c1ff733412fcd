"""Matrix products by the library, with weights that rest in the order in which the processor multiplies fastest.

oneDNN computes a BF16 product on blocks of the weight. If the weight lies in rows, as in a checkpoint, every call
gathers the blocks anew; with few rows in a batch this is about half of the call's time. `packed` gathers them once, at
load; the products are bit-equal. A tied `lm_head` then takes memory of its own beside `embed`.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies `dtype` with instructions made for it. In BF16 it converts where there are none, and
    is slower than products in FP32 (`python -m bench.products`)."""
    if dtype is not torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packed(weight: Tensor) -> Tensor:
    """`weight` [out, in] as `linear` wants it: opaque where oneDNN has fast products, else `weight` itself."""
    if weight.device.type != "cpu" or not has_fast_products(weight.dtype):
        return weight
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return blocked


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight^T + bias [out] -> [..., out], all of one dtype; `weight` packed or not."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
