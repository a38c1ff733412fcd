"""What a model does to single rows between its matrix products, and how a decoded row enters its open page: in torch.

A backend inherits `Rowwise` and overrides what it does in fewer passes; in C++ each is one call. In float32 the forms
are those whose rows do not depend on the rows beside them (`hackkv.model.llama` says how that was measured).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hack_kernels.base import Spans


class Rowwise:
    """Implements `RowKernels` and `append` of `HackKernels`, which say what the arguments are, on any device."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """RMSNorm."""
        if more is not None:
            x.add_(more)
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)

    def rotate(self, x: Tensor, heads: int, turns: Tensor) -> None:
        """Rotary embedding. Products and sums are separate kernels: a fused multiply-add may round differently at the
        edges of vectors."""
        cos, sin = turns[:, None].chunk(2, dim=-1)
        low, high = x[:, :heads].float().chunk(2, dim=-1)
        x[:, :heads].copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))

    def gate(self, x: Tensor) -> Tensor:
        """SwiGLU. torch's float32 silu differs where threads split a tensor off a vector boundary; with exp it does
        not."""
        g, u = x.chunk(2, dim=-1)
        active = g / torch.exp(-g).add_(1) if x.dtype == torch.float32 else F.silu(g)
        return active.mul_(u)

    def largest(self, x: Tensor) -> list[int]:
        """The largest of each row."""
        top, at = x.max(dim=-1)
        return at.where(top.isfinite(), -1).tolist()

    def append(self, open_k: Tensor, open_v: Tensor, spans: Spans, k: Tensor, v: Tensor) -> bool:
        """A decoded row of each sequence, into its open page."""
        rows = k.to(torch.float16), v.to(torch.float16)
        if not all(bool(torch.isfinite(x).all()) for x in rows):
            return False
        at = spans.starts % open_k.shape[2]
        open_k[spans.slots, :, at], open_v[spans.slots, :, at] = rows
        return True
