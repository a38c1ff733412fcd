"""Codec `zack`: K and V keep few channels of a rotation in which the others are small (ZACK, §4 and §5).

For each KV head the offline step (`measure.calibrate.projections`) stacks the rows of both factors of a product and
decomposes them, A = U Σ R^T: Q and K after the rotary embedding, and V and the head's slices of W_o (§4.3). Vectors
rotated by a common R have the same products (lemma 2), and the last channels of rotated vectors are small.

V rests as v' = v R_p, folded into W_v and W_o (lemma 1, Fig. 8). K rests as k' = k R_p and meets q' = q R_p. This
rotation cannot be folded because of the rotary embedding (§5.1), so Q and K are rotated at run time. Scores are divided
by the root of the head's own dimension, however many channels are left.

One number r for all heads decides how many channels stay: the share of the sum of singular values that may go (Eq. 6).
Here all heads of a layer, K and V, keep as many channels as the one of them that needs most, since pages of a layer
have one width. The width is rounded up to a multiple of `step` (§6.1). `Projections.within` is the paper's F_p: from a
size to the smallest r.

The channels that stay are rotated once more, by a Hadamard matrix: channels that are sorted by size would make a bad
use of codes with a common scale. The matrix is orthogonal, so nothing else changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from hack_kernels.base import Backend
from hack_kernels.head_rotations import HeadRotations
from pydantic import BeforeValidator, Field
from torch import Tensor

from hackkv.codec import KvCodec, fp16_page_bytes
from hackkv.codecs.artifact import UNCALIBRATED, ZACK, Artifact, read_artifact
from hackkv.codecs.hadamard import hadamard
from hackkv.codecs.paged import PagedCodec
from hackkv.codecs.rotated import RotatedCodec
from hackkv.config import Frozen
from hackkv.types import KvShape

SIDES: Final = ("qk", "vw")
"""The two pairs of a head that share a rotation."""

WORST_ANGLE: Final = 1e-3
"""The largest distance of R^T R from 1."""


def _share(given: Any) -> Any:
    text = str(given).strip()
    if not text.endswith("%"):
        raise ValueError(f"{given!r} is no percentage such as 5%")
    return float(text.removesuffix("%")) / 100


Share = Annotated[float, BeforeValidator(_share)]
"""Written as a percentage."""


class ZackSettings(Frozen):
    """Settings of `zack`, beside those of the codec whose pages it keeps."""

    calibration: str = UNCALIBRATED
    """Path of a file that `hackkv calibrate zack` wrote for this model."""
    removal: Share = Field(default=0.05, ge=0, lt=1)
    """r of Eq. 6: the share of the singular values' sum that may go."""
    share: Share | None = Field(default=None, gt=0, le=1)
    """Bytes of sealed pages to stay within, as a share of FP16's: then r follows from it (F_p)."""
    step: int = Field(default=16, ge=1)
    """A page's number of channels is a multiple of this, or all."""


@dataclass(frozen=True, slots=True)
class Projections:
    """The rotations of a model and their singular values, as its file has them."""

    rotations: Mapping[str, Tensor]
    """By side, [layers, Hkv, D, D] float64: R, a column for each channel, the largest first."""
    tails: Tensor
    """[layers, 2 Hkv, D] float64, heads of qk, then vw: the share of the sum that a channel and all behind it have."""

    @classmethod
    def of(cls, artifact: Artifact, shape: KvShape) -> Projections:
        """The projections in a file. Raises `ValueError` naming file and tensor."""
        heads, dim = shape.num_kv_heads, shape.head_dim
        rotations, tails = dict[str, Tensor](), list[Tensor]()
        for side in SIDES:
            each, values = list[Tensor](), list[Tensor]()
            for layer in range(shape.num_layers):
                name = f"layers.{layer}.{side}"
                rotation = artifact.tensor(name, (heads, dim, dim)).double()
                error = (rotation.mT @ rotation - torch.eye(dim, dtype=torch.float64)).abs().amax((1, 2))
                if bool((error > WORST_ANGLE).any()):
                    head = int(error.argmax())
                    raise ValueError(f"{artifact.path}: {name}: the columns of KV head {head} are not orthonormal")
                sizes = artifact.tensor(f"{name}_values", (heads, dim)).double()
                if bool((sizes < 0).any()) or bool((sizes.diff(dim=-1) > 0).any()):
                    raise ValueError(f"{artifact.path}: {name}_values: singular values do not fall from large to 0")
                each.append(rotation)
                values.append(sizes)
            rotations[side] = torch.stack(each)
            sums = torch.stack(values).flip(-1).cumsum(-1).flip(-1)
            tails.append(sums / sums[..., :1].clamp(min=torch.finfo(torch.float64).tiny))
        return cls(rotations, torch.cat(tails, 1))

    def ranks(self, removal: float) -> list[int]:
        """Eq. 6: how many channels the most demanding head of each layer keeps, at least one."""
        found: list[int] = self._kept(removal).amax(-1).tolist()
        return found

    def means(self, removal: float) -> tuple[float, float]:
        """Channels that heads keep on average, of K and of V, if each had a width of its own."""
        k, v = self._kept(removal).double().chunk(2, dim=-1)
        return float(k.mean()), float(v.mean())

    def within(self, fits: Callable[[float], bool]) -> float | None:
        """F_p: the least removal rate with which it `fits`, if there is any. Ranks fall as the rate rises."""
        rates = [0.0, *torch.unique(self.tails[self.tails < 1]).tolist()]
        found = bisect_left(rates, True, key=fits)
        return rates[found] if found < len(rates) else None

    def _kept(self, removal: float) -> Tensor:
        return (self.tails > removal).sum(-1).clamp(min=1)


def make_projecting(
    name: str, shape: KvShape, backend: Backend, chosen: ZackSettings, below: Callable[[KvShape], KvCodec]
) -> RotatedCodec:
    """A codec whose pages are those that `below` makes for fewer channels.

    Raises `ValueError` naming a bad setting, or the file and tensor that are wrong.
    """
    if chosen.calibration == UNCALIBRATED:
        raise ValueError("calibration: projections are fitted to a model; hackkv calibrate zack writes the file")
    artifact = read_artifact(Path(chosen.calibration))
    artifact.check(ZACK)
    found = Projections.of(artifact, shape)
    kept = _made(shape, chosen.step, below)

    def widths(removal: float) -> list[int]:
        return [next(width for width in kept if width >= rank) for rank in found.ranks(removal)]

    def size(removal: float) -> float:
        used = sum(kept[width].formats[layer].page_bytes for layer, width in enumerate(widths(removal)))
        return used / sum(map(fp16_page_bytes, kept[shape.head_dim].formats))

    removal = chosen.removal
    if (share := chosen.share) is not None:
        rate = found.within(lambda removal: size(removal) <= share)
        if rate is None:
            raise ValueError(f"share: {share:.1%} of FP16 is too little; the least is {size(1):.1%}")
        removal = rate
    chosen_widths = widths(removal)
    written = (
        ("calibration", artifact.digest),
        ("widths", ",".join(map(str, chosen_widths))),
        *(each for each in kept[shape.head_dim].settings if each[0] != "calibration"),
    )
    parts = [_fold(found, layer, width) for layer, width in enumerate(chosen_widths)]
    codec = RotatedCodec(
        name,
        tuple(kept[width].layers[layer] for layer, width in enumerate(chosen_widths)),
        backend,
        written,
        tuple(rotations.placed(backend.device, backend.rows.lay_out) for rotations, _ in parts),
        tuple(folded for _, folded in parts),
    )
    codec.origin = artifact.origin
    return codec


def _made(shape: KvShape, step: int, below: Callable[[KvShape], KvCodec]) -> dict[int, PagedCodec]:
    """Width -> a codec with pages of that width, narrow ones first, where there is one. Raises `ValueError` if there is
    none for all channels."""
    found = dict[int, PagedCodec]()
    for width in sorted({*range(step, shape.head_dim, step), shape.head_dim}):
        try:
            hadamard(width)
            codec = below(KvShape(shape.num_layers, shape.num_kv_heads, width))
        except ValueError:
            if width == shape.head_dim:
                raise
            continue
        assert isinstance(codec, PagedCodec), "every codec of the table is one"
        if codec.seals_open_page:
            raise ValueError("of: open pages of projected rows stay in FP16")
        found[width] = codec
    return found


def _fold(found: Projections, layer: int, width: int) -> tuple[HeadRotations, Tensor]:
    """The rotations of K and Q in a layer that keeps `width` channels, and that folded into the weights around V."""
    rotated = {side: torch.zeros_like(each[layer]) for side, each in found.rotations.items()}
    for side, into in rotated.items():
        into[..., :width] = found.rotations[side][layer, ..., :width] @ hadamard(width)
    key = rotated["qk"].mT
    # Kernels divide scores by the root of the channels that they see.
    query = key * (width / key.shape[-1]) ** 0.5
    return HeadRotations(query.float().contiguous(), key.float().contiguous()), rotated["vw"]
