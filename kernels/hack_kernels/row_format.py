"""The uncompressed page format: rows of K and V in FP16, as codec `fp16` keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from hack_kernels.base import PageFormat, Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.window import OWN_PAGE_ONLY, Window


@dataclass(frozen=True)
class RowFormat(PageFormat):
    """Planes `k` and `v`, each [Π, D] float16. Attention is exact.

    Arithmetic is FP32; products are BF16 where q is bfloat16 and the processor has such products. Raises `ValueError`
    for a window over pages that are not exact.
    """

    head_dim: int
    page_tokens: int = DEFAULT_PAGE_TOKENS
    exact: bool = True
    """Whether a page holds the rows that it was made of, unchanged. If not, attention goes page by page: a query sees
    its own page as it was, and earlier pages as they rest."""
    window: Window = OWN_PAGE_ONLY
    """The window of the other layers. Here it only fixes the order of slots: slots and pool hold the same rows of
    earlier pages."""

    def __post_init__(self) -> None:
        if self.window != OWN_PAGE_ONLY and not self.exact:
            raise ValueError("window: pages of rows take one only where they are exact")

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """K, then V."""
        shape = (self.page_tokens, self.head_dim)
        return Plane("k", torch.float16, shape), Plane("v", torch.float16, shape)
