"""Matrix products with weights that rest in the order the processor multiplies fastest.

oneDNN computes a BF16 product on blocks of the weight. If the weight lies in rows, as in a checkpoint, every call
gathers the blocks anew; with few rows in a batch this is about half of the call's time. `packed` gathers them once, at
load; the products are bit-equal. A tied `lm_head` then takes memory of its own beside `embed`. FP32 weights are not
packed: batch invariance was measured on MKL's own path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed(weight: Tensor) -> Tensor:
    """`weight` [out, in] as `linear` wants it; an opaque tensor where oneDNN computes in BF16, else `weight` itself."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return weight
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return blocked


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight^T + bias [out] -> [..., out], all of one dtype; `weight` packed or not."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
