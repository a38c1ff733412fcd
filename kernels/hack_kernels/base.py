"""What every backend computes: the page format of the codec `hack` and the operations on it.

Notation. T tokens, B sequences, Hq query heads, Hkv KV heads, D head_dim, N pages in a pool, Π `page_tokens`,
Z `k_partition`, G = D / Z partitions per K row. A partition's elements share a FP16 minimum m and scale s:
x^ = s·code + m.

Wire order of a page of one KV head, the contract of `install` and `export` (a backend may rest in another order):

=========  =====================  =======  ===========================================================
plane      shape                  dtype    meaning
=========  =====================  =======  ===========================================================
k_codes    [Π·k_bits/8, D]        uint8    byte (r, d): tokens f·r .. f·r+f-1 of channel d, f = 8/k_bits
k_min      [Π, G]                 float16  per token and partition of head_dim, rounded down
k_scale    [Π, G]                 float16  rounded up
k_sums     [Π, G]                 sum      Σ codes of the partition (only with `sums`)
v_codes    [D, Π·v_bits/8]        uint8    byte (d, r): tokens f·r .. f·r+f-1 of channel d, f = 8/v_bits
v_min      [D]                    float16  per channel: a V partition is the page
v_scale    [D]                    float16
v_sums     [D]                    sum      Σ codes of the partition (only with `sums`)
=========  =====================  =======  ===========================================================

Bit order: the earliest token sits in the lowest bits. `sum` is uint8 where the largest sum fits, else int16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import torch
from torch import Tensor

PAGE_TOKENS: Final = (32, 64, 128)
HEAD_DIMS: Final = (64, 96, 128, 256)
CODE_BITS: Final = (2, 4)


class BackendUnavailable(RuntimeError):
    """This machine cannot run the backend; the message names what is missing."""


class Rounding(StrEnum):
    """How codes are rounded."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Arithmetic(StrEnum):
    """How Q and P are quantized to 8 bits.

    SYMMETRIC: q' in -127..127 and p' in 0..127, zero point 0. The terms of Eq. (4) with Σk' and Σv' vanish, so pages
    carry no sums. ASYMMETRIC: the paper's form, 256 levels and a minimum for Q and P each, and sums.
    """

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class OpenPage(StrEnum):
    """What a query sees of its own page.

    EXACT: FP16 K and V (the open-page rule). K_CODES: K as codes (quantized at once, as in the paper), V in FP16.
    REQUANTIZE: codes for both; V's codes are dequantized and quantized again with every new token (ablation HACK/RQE).
    """

    EXACT = "exact"
    K_CODES = "k_codes"
    REQUANTIZE = "requantize"


@dataclass(frozen=True, slots=True)
class HackFormat:
    """Everything that fixes the bytes of a page and the arithmetic on it. Raises `ValueError` naming a bad setting."""

    head_dim: int
    page_tokens: int = 64
    k_bits: int = 2
    v_bits: int = 2
    rounding: Rounding = Rounding.NEAREST
    arithmetic: Arithmetic = Arithmetic.SYMMETRIC
    stored_sums: bool = True
    """Keep Σ codes beside the codes (summation elimination); False recomputes them at every use (ablation HACK/SE).
    Without effect in the symmetric form, which needs no sums."""
    open_page: OpenPage = OpenPage.EXACT
    seed: int = 0
    """Deployment seed of stochastic rounding; equal on every node."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("page_tokens", self.page_tokens, PAGE_TOKENS),
            ("k_bits", self.k_bits, CODE_BITS),
            ("v_bits", self.v_bits, CODE_BITS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value}; it must be one of {', '.join(map(str, allowed))}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must fit 64 unsigned bits")

    @property
    def k_partition(self) -> int:
        """Z: the largest multiple of 32 that divides head_dim and does not exceed page_tokens."""
        return max(z for z in range(32, self.page_tokens + 1, 32) if self.head_dim % z == 0)

    @property
    def k_groups(self) -> int:
        """G: partitions per K row."""
        return self.head_dim // self.k_partition

    @property
    def sums(self) -> bool:
        """Whether pages at rest carry sums."""
        return self.arithmetic is Arithmetic.ASYMMETRIC and self.stored_sums

    def plane_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of the planes of one page of one KV head, in wire order."""
        pi, d, g = self.page_tokens, self.head_dim, self.k_groups
        f16 = torch.float16
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "k_codes": ((pi * self.k_bits // 8, d), torch.uint8),
            "k_min": ((pi, g), f16),
            "k_scale": ((pi, g), f16),
            "v_codes": ((d, pi * self.v_bits // 8), torch.uint8),
            "v_min": ((d,), f16),
            "v_scale": ((d,), f16),
        }
        if self.sums:
            specs["k_sums"] = ((pi, g), sum_dtype(self.k_bits, self.k_partition))
            specs["v_sums"] = ((d,), sum_dtype(self.v_bits, pi))
        return specs


def sum_dtype(bits: int, partition: int) -> torch.dtype:
    """Smallest type that holds the sum of a partition of codes."""
    return torch.uint8 if (2**bits - 1) * partition <= 255 else torch.int16


SUM_PLANES: Final = ("k_sums", "v_sums")
HackPages = dict[str, Tensor]
"""One layer's pool of sealed pages: plane name -> [N, Hkv, *plane shape], in the backend's own order."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which rows of a flat ragged batch belong to which sequence, as tensors that a kernel can read.

    Row i of sequence b is row `offsets[b] + i` of Q, K and V and stands at position `starts[b] + i`. Column p of
    `table` is the pool index of the sequence's p-th page; entries past the last page are 0 and never read.
    """

    starts: Tensor
    """[B] int64: position of the first row, so also the number of tokens already cached."""
    counts: Tensor
    """[B] int64: rows of this batch; 1 throughout in `attn_decode`."""
    offsets: Tensor
    """[B] int64: exclusive prefix sum of `counts`."""
    table: Tensor
    """[B, Pmax] int64."""
    slots: Tensor
    """[B] int64: index of the sequence's open page in `open_k` and `open_v`."""


class RowKernels(Protocol):
    """What a model does to single rows between its matrix products; `hack_kernels.rowwise` is the definition.

    Rows are float32, float16 or bfloat16; arithmetic is float32; a row's result does not depend on the rows beside it.
    """

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, for x [T, n] and weight [n] of one dtype.

        `more` [T, n], the residual branch, is added to x in place before.
        """
        ...

    def rotate(self, x: Tensor, heads: int, turns: Tensor) -> None:
        """Turn channel pairs (i, i + D/2) of the first `heads` heads of x [T, H, D] in place; a row is contiguous.

        `turns` [T, D] float32 holds a row's cos [D/2] and then its sin.
        """
        ...

    def gate(self, x: Tensor) -> Tensor:
        """silu(g) * u [T, n] for rows x [T, 2n] that are g and then u."""
        ...

    def largest(self, x: Tensor) -> list[int]:
        """Column of the largest value of each row of x [T, n], the first one among equals.

        -1 for a row that holds NaN, or whose largest value is infinite.
        """
        ...


class HackKernels(RowKernels, Protocol):
    """A backend. Methods check shapes, types and devices before they compute and raise `ValueError` naming the input.

    Rows are FP16: whatever the model computes in, K and V are rounded to FP16 once, and codes are functions of those
    FP16 rows alone (and, for stochastic rounding, of seed, layer, KV head, position and channel).
    """

    name: str
    isa: str
    """What runs them, in a word: the CPU's instruction set, "torch", "triton"."""
    device: torch.device
    """Where pools and all arguments lie."""
    approximation_s: float
    """Seconds spent so far on the correction terms of Eq. (4), where the backend can tell them apart, else 0."""

    def new_pages(self, fmt: HackFormat, num_pages: int, num_kv_heads: int) -> HackPages:
        """A zeroed pool for one layer."""
        ...

    def seal(
        self, fmt: HackFormat, layer: int, pages: HackPages, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Quantize full pages into the pool. k, v [P, Hkv, Π, D] FP16; page_ids, starts [P] int64 (first position)."""
        ...

    def requantize(self, fmt: HackFormat, layer: int, pages: HackPages, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Ablation HACK/RQE: append a batch's rows, k, v [T, Hkv, D] FP16, to the codes of the pages they belong to.

        K rows are quantized alone. Where a page holds rows already, its V is dequantized to FP16, extended and
        quantized again as one partition of all its rows. Codes past them are 0. `spans.slots` is not read.
        """
        ...

    def install(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
        """Wire order to the backend's own, bit-exact; planes are [Hkv, P, *plane shape]. Absent sums are recomputed."""
        ...

    def export(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> HackPages:
        """The backend's own order to wire order: plane name -> [Hkv, P, *plane shape], contiguous."""
        ...

    def append(self, open_k: Tensor, open_v: Tensor, spans: Spans, k: Tensor, v: Tensor) -> bool:
        """Round one row per sequence, k, v [B, Hkv, D], to FP16 and write it to its place in its open page.

        `open_k`, `open_v` are [S, Hkv, Π, D] FP16. False, and nothing is written, where a value is not finite in FP16.
        """
        ...

    def attn_prefill(
        self,
        fmt: HackFormat,
        layer: int,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Causal attention of many rows per sequence: q [T, Hq, D] over cached pages and own k, v [T, Hkv, D] FP16.

        A query sees every page before its own as codes and its own page as `fmt.open_page` says. Every page that the
        batch fills is sealed already; `open_k`, `open_v` [S, Hkv, Π, D] FP16 still hold the rows that each sequence's
        first page had before the batch. Softmax scale is 1/sqrt(D). Returns [T, Hq, D] in q's dtype.
        """
        ...

    def attn_decode(
        self, fmt: HackFormat, layer: int, pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor
    ) -> Tensor:
        """Attention of one row per sequence, q [B, Hq, D], whose K and V stand in the open page already.

        Same rule and result as `attn_prefill` with counts of 1. Returns [B, Hq, D] in q's dtype.
        """
        ...

    def new_rows(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int) -> HackPages:
        """A zeroed pool of uncompressed pages for one layer: `k` and `v` [N, Hkv, Π, D] FP16."""
        ...

    def attn_rows(
        self,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over uncompressed pages, for codec `fp16`: the rules of `attn_prefill`, without codes.

        k, v [T, Hkv, D] FP16 are the batch's rows; None in decode, where they stand in the open pages already. FP32
        arithmetic, or BF16 products where q is bfloat16 and the processor has them. Returns [T, Hq, D] in q's dtype.
        """
        ...
