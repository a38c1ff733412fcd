"""Codecs `kvquant-*`: codes on non-uniform levels, keys by channel, values by row, outliers aside (KVQuant, arXiv
2401.18079).

Values are not spread evenly, so neither are levels (nuq, section 3.3). All vectors of a layer share the places of
their levels, each within its own range. A few values of each vector rest as they are, and do not stretch the range of
the others (3.4). Attention looks a code's value up where it reads the code; `unfused` writes FP16 rows first.

With a calibration file (`hackkv calibrate kvquant`) keys rest as they were before the rotary embedding (3.2),
in ranges by channel that the file knows (3.6). Levels are fitted to the model's own keys and values, with errors
weighted by their effect on the loss (3.3). Without a file, the keys of a page have ranges of their own, keys rest
rotated, as they come, and levels are those of a normal distribution.

Two things differ from the paper. Its outliers are a share of all values, ours a fixed number of each vector, so that
pages have one size. Its first token of a sequence is exact; ours leaves that token's loudest value in each channel of K
to the channel's outlier.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from hack_kernels.base import Backend
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.nuq_format import NuqFormat, NuqKernels, NuqTables
from hack_kernels.reference.nuq import NuqReference
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.artifact import KVQUANT, UNCALIBRATED, Artifact, read_artifact
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

Bits = Literal[2, 3, 4]
Definition = Callable[[NuqFormat, torch.device], NuqKernels]


class KvQuantSettings(Frozen):
    """Settings of the family."""

    k_bits: Bits = 4
    v_bits: Bits = 4
    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)
    unfused: bool = False
    """Write FP16 rows to memory before attention, in every call: for comparisons."""
    calibration: str = UNCALIBRATED
    """Path of a file that `hackkv calibrate kvquant` wrote for this model, or `none`."""


def make_kvquant(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family. Raises `ValueError` naming a bad setting, or the file and tensor that are wrong.

    Calibrated, each layer has kernels of its own; otherwise all layers share them.
    """
    chosen = KvQuantSettings.model_validate(settings)
    artifact = None if chosen.calibration == UNCALIBRATED else read_artifact(Path(chosen.calibration))
    fmt = NuqFormat(
        shape.head_dim,
        chosen.k_bits,
        chosen.v_bits,
        calibrated=artifact is not None,
        page_tokens=chosen.page_tokens,
        fused=not chosen.unfused,
    )
    definition: Definition = NuqReference
    named = chosen.model_dump() | {"calibration": artifact.digest if artifact else UNCALIBRATED}
    written = tuple((key, str(value)) for key, value in sorted(named.items()))
    if artifact is None:
        kept = Kept(fmt, backend.kernels_for(fmt, definition))
        return PagedCodec(name, (kept,) * shape.num_layers, backend, written)
    artifact.check(KVQUANT)
    layers = [backend.kernels_for(fmt, definition) for _ in range(shape.num_layers)]
    for layer, kernels in enumerate(layers):
        kernels.calibrate(tables_of(artifact, layer, shape, fmt))
    codec = PagedCodec(name, tuple(Kept(fmt, kernels) for kernels in layers), backend, written)
    codec.origin = artifact.origin
    return codec


def tables_of(artifact: Artifact, layer: int, shape: KvShape, fmt: NuqFormat) -> NuqTables:
    """The tables of all KV heads of a layer. Raises `ValueError` naming file and tensor."""
    tables = NuqTables(
        artifact.tensor(f"layers.{layer}.k_poles_{fmt.k_bits}", (2**fmt.k_bits,)),
        artifact.tensor(f"layers.{layer}.v_poles_{fmt.v_bits}", (2**fmt.v_bits,)),
        artifact.tensor(f"layers.{layer}.k_range", (2, shape.num_kv_heads, shape.head_dim)),
        artifact.tensor("frequencies", (shape.head_dim // 2,)),
    )
    try:
        tables.check(fmt)
    except ValueError as error:
        raise ValueError(f"{artifact.path}: layers.{layer}.{error}") from error
    return tables
