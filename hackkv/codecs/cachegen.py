"""Codecs `cachegen*` (CacheGen, arXiv 2310.07240): bins around zero, entropy coded on the wire.

Each row has one scale, its largest magnitude; a value becomes one of 2C + 1 symbols around zero, C = bins / 2 - 1.
Early layers get more bins. A *level* says how many; 2 is the default of the authors' code, `eq86` has 8 everywhere and
about the compression that HACK's paper compares with. Rows are those of one KV head, so that heads can be split;
`faithful` gives all heads of a layer one scale a row, as the authors do.

`resident` is the form of pages at rest. With `ints` codes stay integers, and attention reads them there. With `fp16`
codes only travel, and are decoded once on arrival, as the authors do: FP16 in memory, few bytes on the wire.

`delta` is the paper's change-based encoding (section 5.2). Ten tokens make a group. Its first is an anchor in 8 bits;
the deltas of the others to the anchor are quantized in the bins of the level (`delta_format.py`). The authors' code
quantizes rows as they are, and so do we unless told otherwise. Deltas of codes, which would change no value, were
measured and left out: they take more bits than codes (docs/codecs.md).

Differences from the paper: Zstandard takes the place of arithmetic coding, whose tables weigh 2 bits an element on
chunks of 256 tokens. `wire_form: rans` comes nearer to the entropy, with 16 tables a plane that travel with it and that
channels share; it encodes more slowly (docs/codecs.md). Bins of deltas are those that the authors' code has for values;
the paper's are 0.5, 1 and 1.5 by thirds of the layers, in a unit that it does not name. Groups end with their page.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from hack_kernels.base import Backend, PageKernels
from hack_kernels.decoded import DecodedFormat, DecodedKernels
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.delta_format import DeltaFormat, DeltaSide
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.reference.groups import GroupReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.shared_scale import SharedScaleKernels
from pydantic import Field

from hackkv.codec import KvCodec
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

Level = Literal["1", "2", "3", "eq86"]
Bins = tuple[tuple[int, int], ...]
"""(first layer, bins from there on)."""

LEVELS: Final[dict[Level, tuple[Bins, Bins]]] = {
    "1": (((0, 16), (20, 12)), ((0, 16), (2, 12))),
    "2": (((0, 32), (10, 16)), ((0, 32), (2, 16))),
    "3": (((0, 32),), ((0, 32),)),
    "eq86": (((0, 8),), ((0, 8),)),
}
"""Bins of K and of V."""


class CacheGenSettings(Frozen):
    """Settings of the family."""

    level: Level = "2"
    resident: Literal["ints", "fp16"] = "ints"
    """Whether pages rest as codes, or as rows that are decoded once."""
    faithful: bool = False
    """One scale a row for all KV heads of a layer, as in the authors' code. Heads cannot be split over processes then.
    Only with `ints`."""
    delta: bool = False
    """Deltas against anchor tokens, as in the paper; else values, as in the authors' code. Only with `ints`."""
    page_tokens: int = Field(default=DEFAULT_PAGE_TOKENS, multiple_of=8, gt=0, le=256)
    unfused: bool = False
    """Write FP16 rows to memory before attention, in every call: what HACK's paper timed. Only with `ints`."""


def make_cachegen(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family. Layers with the same bins share kernels."""
    chosen = CacheGenSettings.model_validate(settings)
    if chosen.resident == "fp16":
        if chosen.unfused:
            raise ValueError("unfused: pages that rest as FP16 rows are decoded already (resident: ints)")
        if chosen.faithful:
            raise ValueError("faithful: a scale of all heads is for codes that rest (resident: ints)")
        if chosen.delta:
            raise ValueError("delta: rows that are decoded do not become the same deltas again (resident: ints)")
    if chosen.delta and chosen.faithful:
        raise ValueError("faithful: the authors' code, whose scales these are, has no deltas (delta: false)")

    def kept(k: Grouping, v: Grouping) -> Kept:
        if chosen.delta:
            of_k, of_v = DeltaSide(k.bits, k.centre), DeltaSide(v.bits, v.centre)
            deltas = DeltaFormat(shape.head_dim, of_k, of_v, chosen.page_tokens, fused=not chosen.unfused)
            return Kept(deltas, backend.kernels_for(deltas, DeltaReference))
        fmt = GroupFormat(shape.head_dim, k, v, chosen.page_tokens, fused=not chosen.unfused)
        if chosen.resident == "ints":
            kernels: PageKernels = backend.kernels_for(fmt, GroupReference)
            return Kept(fmt, SharedScaleKernels(fmt, kernels, shape.num_kv_heads) if chosen.faithful else kernels)
        decoded = DecodedFormat.of(fmt)
        coder, rows = GroupReference(fmt, backend.device), backend.kernels_for(decoded.rows, RowReference)
        return Kept(decoded, DecodedKernels(decoded, coder, rows), fmt.planes)

    sides = [
        tuple(grouping(bins_of(of, layer), shape.head_dim) for of in LEVELS[chosen.level])
        for layer in range(shape.num_layers)
    ]
    made = {(k, v): kept(k, v) for k, v in dict.fromkeys(sides)}
    named = tuple((key, str(value)) for key, value in sorted(chosen.model_dump().items()))
    return PagedCodec(name, tuple(made[k, v] for k, v in sides), backend, named)


def bins_of(bins: Bins, layer: int) -> int:
    """The bins of one layer."""
    return [count for first, count in bins if first <= layer][-1]


def grouping(bins: int, head_dim: int) -> Grouping:
    """One scale a row, codes of 4 bits where they are enough."""
    centre = bins // 2 - 1
    return Grouping(4 if 2 * centre < 16 else 5, head_dim, centre=centre)
