"""The sizes of a codec's KV (`hackkv.footprint`), which the codec itself says."""

from __future__ import annotations

from math import prod

from hackkv.codec import FP16_BYTES, KvCodec, planes_bytes
from hackkv.footprint import Footprint
from hackkv.types import KvLayout


def footprint_of(codec: KvCodec, layout: KvLayout) -> Footprint:
    """The sizes of a model's KV, for the layers and KV heads of `layout`."""
    widths = tuple(fmt.head_dim for fmt in codec.formats)
    return Footprint(
        page_tokens=layout.page_tokens,
        page_bytes=sum(fmt.page_bytes for fmt in codec.formats) * layout.num_kv_heads,
        wire_page_bytes=sum(map(planes_bytes, codec.wire_planes)) * layout.num_kv_heads,
        row_bytes=2 * FP16_BYTES * sum(widths) * layout.num_kv_heads,
        seals_open_page=codec.seals_open_page,
        window=codec.window,
        noted_bytes=planes_bytes(codec.eviction.notes if codec.eviction else ())
        * layout.num_layers
        * layout.num_kv_heads,
        widths=widths,
    )


def fp16_bytes(layout: KvLayout, tokens: int) -> int:
    """Bytes of K and V of `tokens` tokens in FP16."""
    return prod((2, FP16_BYTES, layout.num_layers, layout.num_kv_heads, layout.head_dim, tokens))
