"""Whole handoffs of random bytes for every codec, as a sender writes them. Fixtures for tests of frames."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hack_kernels import load
from hack_kernels.base import Plane
from torch import Tensor

from hackkv.codec import KvCodec
from hackkv.codec_footprint import footprint_of
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.expected import Expected
from hackkv.framing import FrameWriter
from hackkv.ledger import FrameLedger
from hackkv.types import HandoffEnd, KvFrame, KvLayout, KvShape
from hackkv.wire_form import WIRE_FORMS, WireForm, wire_form

SMALL = KvShape(2, 2, 64)

Content = dict[tuple[int, int], dict[str, Tensor]]
"""(layer, first page) -> planes [heads, pages, *shape]. The last entry of a layer has the exact rows."""


def _usable(name: str) -> bool:
    try:
        wire_form(name)
    except ConfigError:
        return False
    return True


FORMS = [name for name in WIRE_FORMS if _usable(name)]
"""Wire forms whose libraries are installed; in a complete environment all of them."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """A whole handoff: its shape, its planes, and its frames."""

    layout: KvLayout
    codec: KvCodec
    form: WireForm
    num_tokens: int
    content: Content
    frames: list[KvFrame]
    end: HandoffEnd

    def expected(self) -> Expected:
        sizes = footprint_of(self.codec, self.layout)
        return Expected(self.layout, self.codec.wire_planes, self.num_tokens, sizes, self.form)

    def ledger(self) -> FrameLedger:
        return FrameLedger("t-1", 4, self.expected())

    def writer(self) -> FrameWriter:
        """A new writer, which has written nothing."""
        return FrameWriter("t-1", 4, self.form)


def codec_of(name: str, shape: KvShape = SMALL) -> KvCodec:
    """The codec with pages of 32 tokens."""
    return make_codec(CodecConfig(name=name, settings={"page_tokens": 32}), shape, load("reference"))


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random tensor. Elements of one byte have few bits set, so that they shrink when coded; others have any bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    draws = 3 if dtype.itemsize == 1 else 1
    drawn = torch.full((count,), 255, dtype=torch.uint8)
    for _ in range(draws):
        drawn &= torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).view(shape)


def random_plane(plane: Plane, heads: int, pages: int, generator: torch.Generator) -> Tensor:
    """Random bytes of a plane of pages, [heads, pages, *plane shape]. Planes of sizes get sizes that a receiver
    accepts."""
    drawn = random_bytes((heads, pages, *plane.shape), plane.dtype, generator)
    return drawn if plane.most_sum is None else drawn.remainder(plane.most_sum // plane.shape[-1] + 1)


def ship(
    codec: str,
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    tokens: int = 75,
    step: int = 2,
    together: int = 1,
    form: WireForm | None = None,
) -> Shipment:
    """Random bytes for every plane, written for every `step` pages, then the exact rows: `together` layers at a time.

    The wire form is `form`; by default the codec's.
    """
    made = codec_of(codec, KvShape(layers, heads, head_dim))
    form = form or made.wire_form
    layout = KvLayout(layers, heads, head_dim, 32)
    generator = torch.Generator().manual_seed(0)
    writer, content, frames = FrameWriter("t-1", 4, form), Content(), list[KvFrame]()
    sizes = footprint_of(made, layout)
    sealed, sent, rest = sizes.sealed(tokens), sizes.sent_pages(tokens), sizes.exact_rows(tokens)
    groups = [range(layer, min(layer + together, layers)) for layer in range(0, layers, together)]
    for first in sent[::step]:
        count = min(step, sent.stop - first)
        for group in groups:
            for layer in group:
                planes = {plane.name: random_plane(plane, heads, count, generator) for plane in made.wire_planes[layer]}
                content[layer, first] = planes
            frames += writer.frames(group[0], first, [content[layer, first] for layer in group])
    for group in groups if rest else ():
        for layer in group:
            content[layer, sealed] = {
                name: random_bytes((heads, 1, rest, sizes.widths[layer]), torch.float16, generator)
                for name in ("open_k", "open_v")
            }
        frames += writer.frames(group[0], sealed, [content[layer, sealed] for layer in group], rest)
    return Shipment(layout, made, form, tokens, content, frames, writer.end(17))


def rows_of(planes: dict[str, Tensor]) -> int:
    """The number of exact rows; 0 for sealed pages."""
    return planes["open_k"].shape[2] if "open_k" in planes else 0


def same_bytes(x: Tensor, y: Tensor) -> bool:
    flat = [z.contiguous().flatten().view(torch.uint8) for z in (x, y)]
    return (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(flat[0], flat[1])


def changed_span(frame: KvFrame, index: int, **changes: Any) -> KvFrame:
    planes = list(frame.planes)
    planes[index] = replace(planes[index], **changes)
    return replace(frame, planes=tuple(planes))
