"""A codec's effect on a model's KV: bytes from the codec itself, and the work that attention does on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hack_kernels import DEFINITIONS
from hack_kernels import load as load_backend

from hackkv.choices import Eviction
from hackkv.codec_footprint import footprint_of, fp16_bytes
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.footprint import Footprint
from hackkv.types import KvLayout, KvShape
from sim.spec import Codec

_CODES_BELOW = 0.5
"""A page of less than this share of FP16 holds fewer than 8 bits per value: integer codes, which attention multiplies
as they are. Pages of floats are multiplied as floats."""


@dataclass(frozen=True, slots=True)
class CodecSizes:
    """The sizes and costs of a codec on one model."""

    footprint: Footprint
    fp16_page_bytes: int
    """A page of all layers and KV heads, uncompressed."""
    codes: bool
    """Attention multiplies integer codes."""
    dequantizes: bool
    """A step makes FP16 of all pages before it attends."""
    lossless: bool
    bytes_follow_tokens: bool
    """Prompts that begin alike share pages."""
    eviction: Eviction | None = None

    def rows_held(self, tokens: int) -> int:
        """Rows that stay of a prompt of `tokens` tokens after it is computed."""
        return tokens if self.eviction is None else self.eviction.rows_held(tokens)

    @property
    def resting_ratio(self) -> float:
        """Bytes of a sealed page, as a share of FP16."""
        return self.footprint.page_bytes / self.fp16_page_bytes

    @property
    def reads_codes(self) -> bool:
        """Whether attention can use integer products: it has codes and dequantizes nothing."""
        return self.codes and not self.dequantizes


def sizes_of(codec: Codec, shape: KvShape) -> CodecSizes:
    """The sizes of a codec. Raises `ConfigError` naming the preset or the setting at fault."""
    return _sizes(codec.name, tuple(sorted(codec.settings.items())), shape, codec.dequantizes)


@cache
def _sizes(
    name: str, settings: tuple[tuple[str, int | float | str | bool], ...], shape: KvShape, deq: bool
) -> CodecSizes:
    made = make_codec(CodecConfig(name=name, settings=dict(settings)), shape, load_backend(DEFINITIONS))
    layout = KvLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, made.page_tokens)
    footprint = footprint_of(made, layout)
    plain = fp16_bytes(layout, made.page_tokens)
    codes = footprint.page_bytes / plain < _CODES_BELOW
    return CodecSizes(footprint, plain, codes, deq, made.lossless, made.bytes_follow_tokens, made.eviction)
