"""Codecs `kivi-4` and `kivi-2`: integer codes, K grouped along channels, V along tokens (KIVI, §3 and Algorithm 1).

Keys have loud channels, so a group of K is `group` consecutive rows of one channel, and its scale fits that channel. A
group of V is `group` channels of one row. x^ = s·c + m is computed where attention reads the code, as published;
`unfused` writes FP16 rows first.

Two things differ from the authors' code. K and V leave FP16 together, a page at a time; in theirs K waits for R rows
and V for one. The open page is their residual. And s is rounded up to FP16, so no code saturates.
"""

from __future__ import annotations

from typing import Any, Literal

from hack_kernels.base import Backend
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.reference.groups import GroupReference
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

Bits = Literal[2, 4]


class KiviSettings(Frozen):
    """Settings of the family."""

    k_bits: Bits = 4
    v_bits: Bits = 4
    group: int = Field(default=32, ge=8, le=128)
    """G: rows of a group of K, channels of a group of V."""
    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)
    unfused: bool = False
    """Write FP16 rows to memory before attention, in every call: for comparisons."""


def make_kivi(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family."""
    chosen = KiviSettings.model_validate(settings)
    fmt = GroupFormat(
        shape.head_dim,
        Grouping(chosen.k_bits, chosen.group, by_channel=True),
        Grouping(chosen.v_bits, chosen.group),
        chosen.page_tokens,
        fused=not chosen.unfused,
    )
    kept = Kept(fmt, backend.kernels_for(fmt, GroupReference))
    named = tuple((key, str(value)) for key, value in sorted(chosen.model_dump().items()))
    return PagedCodec(name, (kept,) * shape.num_layers, backend, named)
