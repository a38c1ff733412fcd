"""Codecs `fp8`, `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`: K and V as small floating-point numbers with scales.

The sealed page of an `fp8` head has one scale for K and one for V. It needs no calibration, because open pages
keep FP16 rows. The MX formats have a scale for every 32 channels of a row, NVFP4 for every 16; both are independent of
other rows. Attention upcasts values where it reads them (`unfused`: into FP16 rows first, as HACK's paper timed its
rivals).

This file is also the example of CONTRIBUTING.md: settings, a function that makes a codec of them, and rows in `CODECS`.
The format and its definition are `hack_kernels/float_format.py` and `hack_kernels/reference/floats.py`.
"""

from __future__ import annotations

from typing import Any

from hack_kernels.base import Backend
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.reference.floats import FloatReference
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape


class FloatSettings(Frozen):
    """Settings of the family; a preset fixes `element` and `scaling`."""

    element: Element = Element.E4M3
    scaling: Scaling = Scaling.PAGE
    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)
    unfused: bool = False
    """Write FP16 rows to memory before attention, in every call: for comparisons."""


def make_floats(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family."""
    chosen = FloatSettings.model_validate(settings)
    fmt = FloatFormat(shape.head_dim, chosen.element, chosen.scaling, chosen.page_tokens, fused=not chosen.unfused)
    kept = Kept(fmt, backend.kernels_for(fmt, FloatReference))
    named = tuple((key, str(value)) for key, value in sorted(chosen.model_dump().items()))
    return PagedCodec(name, (kept,) * shape.num_layers, backend, named)
