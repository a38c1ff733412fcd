"""Matrix products with weights that rest in the order the processor multiplies fastest.

oneDNN computes a BF16 product on blocks of the weight. Given the rows as a checkpoint has them it gathers those blocks
anew in every call, which costs about half the time where a few rows are decoded. `packed` does it once, at load; the
products are bit-equal. Only a tied `lm_head` takes memory of its own then, beside `embed`. FP32 stays as it is: batch
invariance was measured on MKL's own path.
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
