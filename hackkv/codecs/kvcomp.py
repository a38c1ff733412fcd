"""Codec `kvcomp`: error-bounded codes, Huffman coded where they rest (KVComp, arXiv 2509.00579).

A step is a share of a unit's range. A unit of K is a block, which is a page, or a channel of it; a unit of V is a token
(3.1.1). A value that is read is at most half a step away from the one that was written. Codes rest as Huffman codes
(3.1.2). A page is decoded where attention reads it, into memory of the thread that stays in its cache (3.3.2);
`unfused` writes FP16 rows first. On the wire Zstandard removes the room that a page has not filled.

Three things differ from the paper. Units belong to one KV head, so that heads can be split. Books are static, and a
page chooses among them; the paper's follow from a prompt's histogram, by layer, so a page's bytes would depend on later
rows, and no two prompts could share it. And a page has a fixed room, since pages rest in pools. A page that does not
fit takes a larger step, which then bounds its errors.
"""

from __future__ import annotations

import math
from typing import Any, Final

from hack_kernels.base import Backend
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.huffman_format import (
    LEAST_ROOM,
    LEAST_SCALE,
    MOST_ROOM,
    MOST_SCALE,
    HuffmanFormat,
    HuffmanSide,
    Unit,
)
from hack_kernels.reference.huffman import HuffmanReference
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

ROOM_ABOVE: Final = {Unit.BLOCK: -0.6, Unit.CHANNEL: 0.3, Unit.TOKEN: 0.1}
"""Room by default, in bits a code above -log2 ρ, rounded up to an eighth: what 99% of the pages of SmolLM2 need
(`python -m bench.rooms`). Values of a block spread less, relative to its range, than those of a channel."""


class KvCompSettings(Frozen):
    """Settings of the family."""

    k_unit: Unit = Unit.BLOCK
    k_scale: float = Field(default=0.05, ge=LEAST_SCALE, le=MOST_SCALE)
    """ρ: the step of K, as a share of a unit's range."""
    v_unit: Unit = Unit.TOKEN
    v_scale: float = Field(default=0.15, ge=LEAST_SCALE, le=MOST_SCALE)
    k_room: float | None = Field(default=None, ge=LEAST_ROOM, le=MOST_ROOM)
    """Bits a code that a page of K has room for; by default what ρ asks for."""
    v_room: float | None = Field(default=None, ge=LEAST_ROOM, le=MOST_ROOM)
    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)
    unfused: bool = False
    """Write FP16 rows to memory before attention, in every call: for comparisons."""


def make_kvcomp(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family."""
    chosen = KvCompSettings.model_validate(settings)
    k = side_of(chosen.k_unit, chosen.k_scale, chosen.k_room)
    v = side_of(chosen.v_unit, chosen.v_scale, chosen.v_room)
    fmt = HuffmanFormat(shape.head_dim, k, v, chosen.page_tokens, fused=not chosen.unfused)
    kept = Kept(fmt, backend.kernels_for(fmt, HuffmanReference))
    named = chosen.model_dump() | {"k_room": k.room, "v_room": v.room}
    written = tuple((key, str(value)) for key, value in sorted(named.items()))
    return PagedCodec(name, (kept,) * shape.num_layers, backend, written)


def side_of(unit: Unit, scale: float, room: float | None) -> HuffmanSide:
    """K or V, with the default room if none is given."""
    if room is None:
        wanted = math.ceil(8 * (ROOM_ABOVE[unit] - math.log2(scale))) / 8
        room = min(MOST_ROOM, max(LEAST_ROOM, wanted))
    return HuffmanSide(unit, scale, room)
