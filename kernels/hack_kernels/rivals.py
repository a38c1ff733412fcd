"""What homomorphic attention is measured against, in the same library and with equal craft; for benchmarks only.

`bf16` keeps pages of BF16 rows. `dequantize` reads the pages of `hack` and turns every code into its value before it
multiplies, as systems do that only store the cache quantized. Both need AVX-512 BF16, and page_tokens and head_dim that
are multiples of 64. Their own page is exact, their arguments are those of `HackKernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import Arithmetic, BackendUnavailable, HackFormat, HackPages, OpenPage, Spans
from hack_kernels.cpu import extension, native_format, row_format


@dataclass(frozen=True, slots=True)
class Rows:
    """Arguments of one call; k and v [T, Hkv, D] FP16 in prefill, None in decode."""

    open_k: Tensor
    open_v: Tensor
    spans: Spans
    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None


class Rival:
    """`bf16` or `dequantize`. Raises `BackendUnavailable` where the processor lacks AVX-512 BF16."""

    def __init__(self, name: str, threads: int) -> None:
        try:
            self._kernels = extension().rival(name, threads)
        except ValueError as error:
            raise BackendUnavailable(str(error)) from error
        self.name = name

    def attend(self, fmt: HackFormat, pages: HackPages, rows: Rows) -> Tensor:
        """Attention over `pages`: of `bf16_pages` for `bf16`, of the `cpu` backend for `dequantize`."""
        if fmt.arithmetic is not Arithmetic.SYMMETRIC or fmt.open_page is not OpenPage.EXACT:
            raise ValueError("rivals know neither forms of P and Q nor other open pages")
        if fmt.page_tokens % 64 or fmt.head_dim % 64 or (fmt.k_bits, fmt.v_bits) != (2, 2):
            raise ValueError("rivals need 2 bits, and page_tokens and head_dim that are multiples of 64")
        out = torch.empty_like(rows.q)
        spans = rows.spans
        where = (spans.starts, spans.counts, spans.offsets, spans.table, spans.slots)
        self._kernels.attend(self._format(fmt), 0, pages, rows.open_k, rows.open_v, where, rows.q, out, rows.k, rows.v)
        return out

    def _format(self, fmt: HackFormat) -> Any:
        return native_format(fmt) if self.name == "dequantize" else row_format(fmt.page_tokens, fmt.head_dim)


def bf16_pages(k: Tensor, v: Tensor) -> HackPages:
    """Pages of the rival `bf16` from rows [N, Hkv, Π, D] of any dtype, in the order that its products want."""
    n, heads, pi, d = k.shape
    k_order = k.bfloat16().view(n, heads, pi // 16, 16, d // 2, 2).transpose(3, 4)
    v_order = v.bfloat16().view(n, heads, pi // 2, 2, d // 16, 16).permute(0, 1, 4, 2, 5, 3)
    return {
        name: x.contiguous().view(n, heads, pi, d).view(torch.uint8)
        for name, x in (("k_codes", k_order), ("v_codes", v_order))
    }


def run_dots(isa: str, rounds: int, threads: int) -> int:
    """Run bare integer dots in registers on each thread; returns how many products of two bytes that were in all."""
    extension().dots(isa, rounds, threads)
    return int(extension().PRODUCTS_PER_ROUND) * rounds * threads


def read_all(words: Tensor, threads: int) -> None:
    """Read a tensor of uint64, a multiple of 2^17 of them: the machine's read bandwidth."""
    extension().read_all(words, threads)
