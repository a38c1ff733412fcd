"""Codec `fp16`: the uncompressed baseline over the same seams. Pages are FP16 rows; attention is exact."""

from __future__ import annotations

from typing import Any

from hack_kernels.base import Backend
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape


class Fp16Settings(Frozen):
    """Settings of `fp16`."""

    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)


def make_fp16(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """The codec `fp16`."""
    fmt = RowFormat(shape.head_dim, Fp16Settings.model_validate(settings).page_tokens)
    kept = Kept(fmt, backend.kernels_for(fmt, RowReference))
    return Fp16Codec(name, (kept,) * shape.num_layers, backend, (("page_tokens", str(fmt.page_tokens)),))


class Fp16Codec(PagedCodec):
    """Rows rest as FP16 holds them."""

    lossless = True
