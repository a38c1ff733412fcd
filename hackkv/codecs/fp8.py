"""Codec `fp8`: K and V as E4M3 (OCP 8-bit floating point), one scale a page and KV head; half the bytes.

x^ = s·e with e in E4M3 and s = max|x| / 448 rounded up in FP32, so nothing saturates. K and V have a scale each. Open
pages keep FP16 rows, which is what makes a scale per page possible without calibration. Attention upcasts a page where
it is read. The definition below is the only implementation yet; it serves on every backend.

This file is also the example of CONTRIBUTING.md: a page format, its definition, its settings and one row in `CODECS`
are all that a new codec takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Final

import torch
from hack_kernels.base import Backend, PageFormat, Plane, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.reference.ragged import exact_attention, held_pages, sequences
from hack_kernels.reference.wire_order import WireOrder
from pydantic import Field
from torch import Tensor

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

LARGEST: Final = 448.0
"""The largest finite E4M3 value."""


@dataclass(frozen=True)
class Fp8Format(PageFormat):
    """Planes `k` and `v` [Π, D] of E4M3 bytes, and their scales, one float32 each."""

    head_dim: int
    page_tokens: int = 64

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """K and its scale, then V and its scale."""
        rows = (self.page_tokens, self.head_dim)
        return (
            Plane("k", torch.uint8, rows),
            Plane("k_scale", torch.float32, (1,)),
            Plane("v", torch.uint8, rows),
            Plane("v_scale", torch.float32, (1,)),
        )


class Fp8Reference(WireOrder):
    """Implements `PageKernels` for `Fp8Format`."""

    def __init__(self, fmt: Fp8Format, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self.approximation_s = 0.0

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """All pages at once."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        for name, rows in (("k", k), ("v", v)):
            codes, scale = to_fp8(rows)
            pool.planes[name][page_ids], pool.planes[f"{name}_scale"][page_ids] = codes, scale

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """FP32 over upcast pages. Queries run page by page, so that each sees its own page in FP16."""
        check_attention(self.fmt, pool, spans, rows)
        out, page_tokens = torch.empty_like(rows.q), self.fmt.page_tokens
        for part in sequences(pool, spans, rows):
            end = part.start + part.q.shape[0]
            last = (end - 1) // page_tokens
            began = perf_counter()
            sealed = [self._upcast(pool, name, part.table, last) for name in ("k", "v")]
            self.approximation_s += perf_counter() - began
            first = part.start // page_tokens
            for page in range(first, last + 1):
                begin, stop = max(part.start, page * page_tokens), min(end, (page + 1) * page_tokens)
                own = slice((page - first) * page_tokens, stop - first * page_tokens)
                k, v = (
                    torch.cat((cached[: page * page_tokens], new[own].float()))
                    for cached, new in zip(sealed, (part.own_k, part.own_v), strict=True)
                )
                queries = slice(begin - part.start, stop - part.start)
                rows_out = slice(part.rows.start + queries.start, part.rows.start + queries.stop)
                out[rows_out] = exact_attention(part.q[queries], k, v, begin)
        return out

    def _upcast(self, pool: Pool, name: str, table: Tensor, count: int) -> Tensor:
        """The first `count` pages of a sequence as FP32 rows [count·Π, Hkv, D]."""
        codes, scale = (held_pages(pool.planes[plane], table, count) for plane in (name, f"{name}_scale"))
        rows = codes.view(torch.float8_e4m3fn).float() * scale[..., None]
        return rows.transpose(1, 2).flatten(0, 1)


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pages [P, Hkv, Π, D] FP16 -> E4M3 bytes [P, Hkv, Π, D] and scales [P, Hkv, 1] FP32."""
    wide = rows.float()
    largest = wide.abs().amax((-2, -1))
    scale = largest / LARGEST
    # A division that rounded down would push the largest value past 448.
    scale = torch.where(scale * LARGEST < largest, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (wide / scale[..., None, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale[..., None]


class Fp8Settings(Frozen):
    """Settings of `fp8`."""

    page_tokens: int = Field(default=64, multiple_of=8, gt=0, le=256)


def make_fp8(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """The codec `fp8`."""
    fmt = Fp8Format(shape.head_dim, Fp8Settings.model_validate(settings).page_tokens)
    kept = Kept(fmt, backend.kernels_for(fmt, Fp8Reference))
    return PagedCodec(name, (kept,) * shape.num_layers, backend, (("page_tokens", str(fmt.page_tokens)),))
