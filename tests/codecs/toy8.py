"""A worked example of CONTRIBUTING.md's "Add a codec": integers of 8 bits, with a scale for K and one for V of a page.

Format, definition, settings and the function that makes a codec of them are in this one module. The codec joins
`CODECS` by one row (`tests/conftest.py`). So every test that loops over the table covers it: wires, failover, swap,
prefixes, replay, tokens. Two tests pin a fact of every codec, and so name this one: the bytes of its page, and that no
backend has kernels which record its steps. A codec of the product has the same four parts, at the places that
CONTRIBUTING.md names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from hack_kernels.base import Backend, Plane, Planes
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.reading import ALL_HEADS, ReadingReference
from pydantic import Field
from torch import Tensor

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

ZERO: Final = 128
"""The code of 0."""
LARGEST: Final = 127
"""The largest distance of a code from `ZERO`."""


@dataclass(frozen=True)
class Toy8Format(ReadFormat):
    """A sealed page of K and V: codes uint8 [Π, D], and a scale float32 [1] that multiplies (code - `ZERO`)."""

    head_dim: int
    page_tokens: int = DEFAULT_PAGE_TOKENS

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then those of V."""
        shape = (self.page_tokens, self.head_dim)
        return tuple(
            plane
            for name in ("k", "v")
            for plane in (Plane(name, torch.uint8, shape), Plane(f"{name}_scale", torch.float32, (1,)))
        )


class Toy8Reference(ReadingReference):
    """The definition: implements `PageKernels` for `Toy8Format`, on every device that torch knows."""

    def __init__(self, fmt: Toy8Format, device: torch.device) -> None:
        super().__init__(fmt, device)

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Quantize rows [..., Π, D] FP16 to planes, each value to the nearest code. A page of zeros has the scale 1."""
        x = rows.float()
        largest = x.abs().amax((-2, -1))
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST)[..., None]
        codes = (x / scale[..., None]).round() + ZERO
        return {name: codes.to(torch.uint8), f"{name}_scale": scale}

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """Convert planes to rows [..., Π, D] FP32."""
        return (planes[name].float() - ZERO) * planes[f"{name}_scale"][..., None]


class Toy8Settings(Frozen):
    """Settings of the codec. All of them change bytes, so all are in the fingerprint."""

    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)


def make_toy8(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """Make the codec: one format in all layers, on the backend's kernels if it has some."""
    chosen = Toy8Settings.model_validate(settings)
    fmt = Toy8Format(shape.head_dim, chosen.page_tokens)
    kept = Kept(fmt, backend.kernels_for(fmt, Toy8Reference))
    written = tuple((key, str(value)) for key, value in sorted(chosen.model_dump().items()))
    return PagedCodec(name, (kept,) * shape.num_layers, backend, written)
