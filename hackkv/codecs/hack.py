"""Codec `hack`: KV quantized once, to 2, 4 or 8 bits, and attended to on its codes (HACK, sections 5 and 6).

The page format, the bit order and the arithmetic are those of `hack_kernels`; this file has the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hack_kernels.base import Backend, Pool, Spans
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.hack_format import Arithmetic, HackFormat, HackKernels, OpenPage, Rounding
from hack_kernels.reference.hack import HackReference
from pydantic import Field
from torch import Tensor

from hackkv.batch import Batch
from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec, Settings, decode_rows
from hackkv.config import Frozen
from hackkv.types import KvShape

Definition = Callable[[HackFormat, torch.device], HackKernels]


class HackSettings(Frozen):
    """Settings of the `hack` presets; see `HackFormat`."""

    page_tokens: int = DEFAULT_PAGE_TOKENS
    k_bits: int = 2
    v_bits: int = 2
    rounding: Rounding = Rounding.NEAREST
    arithmetic: Arithmetic = Arithmetic.SYMMETRIC
    stored_sums: bool = True
    open_page: OpenPage = OpenPage.EXACT
    send_sums: bool = False
    seed: int = Field(default=0, ge=0, lt=2**64)


def make_hack(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family. Raises `ValueError` naming a bad setting."""
    chosen = HackSettings.model_validate(settings)
    fields = chosen.model_dump()
    send_sums = fields.pop("send_sums")
    fmt = HackFormat(head_dim=shape.head_dim, **fields)
    if send_sums and not fmt.sums:
        raise ValueError("send_sums is set, but these settings keep no sums")
    definition: Definition = HackReference
    kernels = backend.kernels_for(fmt, definition)
    names = (
        "page_tokens",
        "k_bits",
        "v_bits",
        "rounding",
        "arithmetic",
        "stored_sums",
        "open_page",
        "seed",
        "send_sums",
    )
    written = tuple((setting, str(getattr(chosen, setting))) for setting in names)
    layers = (Kept(fmt, kernels, fmt.planes if send_sums else None),) * shape.num_layers
    if fmt.open_page is OpenPage.REQUANTIZE:
        return RequantizingCodec(name, layers, backend, written, kernels.requantize)
    return PagedCodec(name, layers, backend, written)


class RequantizingCodec(PagedCodec):
    """Ablation HACK/RQE: the open page rests as codes too, and its V is quantized again with every row."""

    def __init__(
        self,
        name: str,
        layers: tuple[Kept, ...],
        backend: Backend,
        settings: Settings,
        requantize: Callable[[int, Pool, Spans, Tensor, Tensor], None],
    ) -> None:
        super().__init__(name, layers, backend, settings)
        self._requantize = requantize

    @property
    def seals_open_page(self) -> bool:
        """The last page is codes too, however few rows it holds."""
        return True

    def seal(self, layer: int, pool: Pool, batch: Batch, rows: tuple[Tensor, Tensor] | None = None) -> None:
        """Quantize the pages that the batch touches: every row goes into its page's codes."""
        with self.sealing:
            self._requantize(layer, pool, batch.where, *(rows or decode_rows(pool, batch)))
