"""Codecs `rot-*`: rotated rows of K and V as codes around zero, with a scale per row.

Real keys have a few loud channels, which cost all others their precision. Rotated, the channels of a row look alike and
codes without a minimum fit (QuaRot, arXiv 2404.00456; `hack_kernels.level_format`). Pages are never rotated back:

V rests as v' = v H with H the orthonormal Hadamard matrix. H is folded into the weights when the model is loaded, at no
cost, unless they rest as codes: numbers would take two or three times the bytes, which every step of decode reads.
In that case rows of V are rotated at run time, and the outputs of attention are rotated back.
K rests as k' = (k - mean) T per KV head and meets q' = q T^-T. q'·k' is q·k less q·mean, which is the same for all keys
of a query, so the softmax does not notice it. T comes after the rotary embedding and cannot be folded.

Without calibration T = H and mean = 0. A calibration file (`hackkv calibrate`) brings T, the means, and the feedback by
which the codes of a row of K make up for each other's errors (`LevelKernels.set_feedback`).

In a layer that is left exact (`exact_layers`) nothing is rotated: its pages are FP16 rows, as those of `fp16` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from hack_kernels.base import Backend, Pool
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.level_format import Feedback, LevelFormat, LevelKernels, Scales
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import Window
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from hackkv.batch import Batch
from hackkv.codec import AttentionWeights, KvCodec
from hackkv.codecs.artifact import ROTATED, UNCALIBRATED, Artifact, read_artifact
from hackkv.codecs.hadamard import hadamard
from hackkv.codecs.paged import Kept, PagedCodec, Settings
from hackkv.config import Frozen
from hackkv.types import KvShape

Definition = Callable[[LevelFormat, torch.device], LevelKernels]

EXACT_BITS: Final = 16
"""The bits of a layer that is left exact, as the fingerprint gives them."""

WORST_CONDITION: Final = 1e4
"""The largest condition number of a basis: beyond it, q T^-T in FP32 loses precision that the codes keep."""


class RotatedSettings(Frozen):
    """Settings of the `rot-*` presets; see `LevelFormat`."""

    page_tokens: int = DEFAULT_PAGE_TOKENS
    k_bits: int = 4
    v_bits: int = 4
    sink: int = 0
    """First pages of a sequence that queries see exactly; see `Window`."""
    recent: int = 0
    """Pages before a query's own that it sees exactly."""
    exact_layers: int | str = ""
    """Layers whose K and V rest in FP16: numbers with commas between, such as `0,29`; negative ones count from the
    last."""
    scales: Scales = Scales.FP16
    """How the scale of a row rests: `fp16`, or `fp8`, which is a byte."""
    calibration: str = UNCALIBRATED
    """Path of a file that `hackkv calibrate` wrote for this model, or `none`. A worker whose settings have neither
    takes the file that ships for its model, if there is one (`hackkv.model.worker`)."""


class LayerBits(Frozen):
    """Bits by layer, which a calibration file may have for some presets (`hackkv calibrate --target-bytes`)."""

    k_bits: int
    """`k_bits` and `v_bits` are those of the preset that `k` and `v` are for; other presets ignore them."""
    v_bits: int
    k: tuple[int, ...]
    v: tuple[int, ...]


_WRITTEN: Final = TypeAdapter(tuple[LayerBits, ...])


def make_rotated(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of the family. Raises `ValueError` naming a bad setting, or the file and tensor that are wrong."""
    chosen = RotatedSettings.model_validate(settings)
    window = Window(chosen.sink, chosen.recent)
    bits = [(chosen.k_bits, chosen.v_bits)] * shape.num_layers
    digest, origin = UNCALIBRATED, None
    feedback = list[Feedback]()
    if chosen.calibration == UNCALIBRATED:
        rotations = (plain_rotations(shape.head_dim).placed(backend.device, backend.rows.lay_out),) * shape.num_layers
    else:
        artifact = read_artifact(Path(chosen.calibration))
        artifact.check(ROTATED)
        digest, origin, bits = artifact.digest, artifact.origin, layer_bits(artifact, bits)
        rotations = tuple(
            calibrated_rotations(artifact, layer, shape).placed(backend.device, backend.rows.lay_out)
            for layer in range(shape.num_layers)
        )
        feedback = [feedback_of(artifact, layer, shape) for layer in range(shape.num_layers)]
    exact = exact_layers(str(chosen.exact_layers), shape.num_layers)
    formats = [LevelFormat(shape.head_dim, chosen.page_tokens, *each, window, chosen.scales) for each in bits]
    definition: Definition = LevelReference
    used = (fmt for layer, fmt in enumerate(formats) if layer not in exact)
    kernels = {fmt: backend.kernels_for(fmt, definition) for fmt in dict.fromkeys(used)}
    for layer, each in enumerate(feedback):
        if layer not in exact:
            kernels[formats[layer]].set_feedback(layer, each.to(backend.device))
    written = (
        ("page_tokens", str(chosen.page_tokens)),
        ("k_bits", _in_words([EXACT_BITS if layer in exact else k for layer, (k, _) in enumerate(bits)])),
        ("v_bits", _in_words([EXACT_BITS if layer in exact else v for layer, (_, v) in enumerate(bits)])),
        ("sink", str(window.sink)),
        ("recent", str(window.recent)),
        ("calibration", digest),
        *_otherwise(chosen, "scales"),
    )
    rows = RowFormat(shape.head_dim, chosen.page_tokens, window=window)
    as_rows = Kept(rows, backend.kernels_for(rows, RowReference))
    layers = tuple(as_rows if layer in exact else Kept(fmt, kernels[fmt]) for layer, fmt in enumerate(formats))
    folded = (hadamard(shape.head_dim)[None],) * shape.num_layers
    codec = RotatedCodec(name, layers, backend, written, rotations, folded, exact)
    codec.origin = origin
    return codec


def exact_layers(text: str, layers: int) -> frozenset[int]:
    """The layers that the setting names, of `layers` layers. Raises `ValueError` naming a word that names none."""
    found = set[int]()
    for word in filter(None, map(str.strip, text.split(","))):
        number = int(word) if word.removeprefix("-").isdecimal() else layers
        if not -layers <= number < layers:
            raise ValueError(f"exact_layers: {word!r} is no layer of a model of {layers}")
        found.add(number % layers)
    return frozenset(found)


def written_bits(artifact: Artifact) -> tuple[LayerBits, ...]:
    """The bits by layer that the file has, for each preset that has some. Raises `ValueError` naming the file."""
    try:
        return _WRITTEN.validate_python(artifact.about.get("layer_bits", ()))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{artifact.path}: layer_bits.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def layer_bits(artifact: Artifact, plain: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bits of K and V by layer: those of the file if it has some for a preset with these, else `plain`.

    Raises `ValueError` naming the file.
    """
    found = next((each for each in written_bits(artifact) if (each.k_bits, each.v_bits) == plain[0]), None)
    if found is None:
        return plain
    if not len(found.k) == len(found.v) == len(plain):
        said = f"{len(found.k)} layers of K and {len(found.v)} of V; the model has {len(plain)}"
        raise ValueError(f"{artifact.path}: layer_bits: {said}")
    return list(zip(found.k, found.v, strict=True))


def _in_words(bits: list[int]) -> str:
    """The bits of all layers as text: one number if they are the same."""
    return ",".join(map(str, bits)) if len(set(bits)) > 1 else str(bits[0])


def _otherwise(settings: RotatedSettings, *names: str) -> Settings:
    """The settings `names` that differ from the family's defaults, as text. Defaults are left out, so that earlier
    fingerprints, by which measurements and caches are found, stay the same."""
    own = RotatedSettings()
    values = ((name, getattr(settings, name)) for name in names)
    return tuple((name, str(value)) for name, value in values if value != getattr(own, name))


def plain_rotations(head_dim: int) -> HeadRotations:
    """T = H for all KV heads."""
    rotation = hadamard(head_dim).mT.float().contiguous()[None]
    return HeadRotations(rotation, rotation)


def calibrated_rotations(artifact: Artifact, layer: int, shape: KvShape) -> HeadRotations:
    """T and the means of a layer, and T's inverse in float64. Raises `ValueError` naming file and tensor."""
    name, heads, dim = f"layers.{layer}.basis", shape.num_kv_heads, shape.head_dim
    basis = artifact.tensor(name, (heads, dim, dim)).double()
    mean = artifact.tensor(f"layers.{layer}.mean", (heads, dim)).double()
    values = torch.linalg.svdvals(basis)  # largest first
    for head, (largest, smallest) in enumerate(zip(values[:, 0].tolist(), values[:, -1].tolist(), strict=True)):
        if smallest * WORST_CONDITION < largest or largest == 0:
            condition = largest / smallest if smallest else torch.inf
            raise ValueError(
                f"{artifact.path}: {name}: KV head {head} has condition number {condition:.3g}, "
                f"more than {WORST_CONDITION:g}"
            )
    shift = -(mean[:, None] @ basis)[:, 0]
    return HeadRotations(torch.linalg.inv(basis).float().contiguous(), basis.mT.float().contiguous(), shift.float())


def feedback_of(artifact: Artifact, layer: int, shape: KvShape) -> Feedback:
    """The feedback of all KV heads of a layer. Raises `ValueError` naming file and tensor."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    gains = artifact.tensor(f"layers.{layer}.gains", (heads, dim, dim))
    found = Feedback(gains, artifact.tensor(f"layers.{layer}.weights", (heads, dim)))
    try:
        found.check(dim)
    except ValueError as error:
        raise ValueError(f"{artifact.path}: layers.{layer}.{error}") from error
    return found


class RotatedCodec(PagedCodec):
    """Open and sealed pages of rotated rows. K and Q are rotated at run time, V by the weights unless they are codes.

    Where pages of a layer are narrower than heads, only the first channels of rotated rows rest. A layer that is left
    exact keeps rows as they come.
    """

    prepares_weights = True

    def __init__(
        self,
        name: str,
        layers: tuple[Kept, ...],
        backend: Backend,
        settings: Settings,
        rotations: tuple[HeadRotations, ...],
        folded: tuple[Tensor, ...],
        exact: frozenset[int] = frozenset(),
    ) -> None:
        """`layers`, `rotations` and `folded` have one entry for each layer, with all KV heads of the model. `folded`
        are rotations of V, [Hkv, D, D], or [1, D, D] for all heads, float64; columns of 0 drop channels. Nothing is
        rotated in layers that are `exact`."""
        super().__init__(name, layers, backend, settings)
        self._rotations, self._folded, self._exact = list(rotations), folded, exact

    def prepare_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """Fold R: W_v' = R^T W_v and, as the heads' outputs are sums of V', W_o' = W_o R. In float64, then rounded."""
        if layer in self._exact:
            return weights
        if weights.packed:
            rotation = self._folded[layer].float().to(self._backend.device)
            value, out = map(self._backend.rows.lay_out, (rotation.mT, rotation))
            self._rotations[layer] = replace(self._rotations[layer], value=value, out=out)
            return weights
        qkv, out, bias = weights.qkv, weights.out, weights.qkv_bias
        rotation = self._folded[layer].to(qkv.device)
        dim = rotation.shape[-1]
        # Query heads are as wide as `out`; K and V share the rest of the rows.
        v_rows = (qkv.shape[0] - out.shape[1]) // 2
        rows = qkv[-v_rows:].double().unflatten(0, (-1, dim))  # [Hkv, D, hidden]
        grouped = out.double().unflatten(1, (rows.shape[0], -1, dim))  # [hidden, Hkv, G, D]
        rotated_out = (
            (grouped.transpose(0, 1).flatten(1, 2) @ rotation).unflatten(1, (out.shape[0], -1)).transpose(0, 1)
        )
        if bias is not None:
            rotated_bias = bias[-v_rows:].double().unflatten(0, (-1, 1, dim)) @ rotation
            bias = torch.cat((bias[:-v_rows], rotated_bias.flatten().to(bias.dtype)))
        return replace(
            weights,
            qkv=torch.cat((qkv[:-v_rows], (rotation.mT @ rows).flatten(0, 1).to(qkv.dtype))),
            qkv_bias=bias,
            out=rotated_out.flatten(1).to(out.dtype),
        )

    def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rows are rounded to FP16 before the rotation, too: a value that FP16 does not hold makes its rotated row not
        finite, and so is found. V that the weights rotated is only rounded after it."""
        if layer in self._exact:
            return super().attend(layer, pool, batch, q, k, v)
        rows, rotations = self._backend.rows, self._rotations[layer].heads(pool.head_start, pool.num_kv_heads)
        rotated: tuple[Tensor, ...] = rows.rotate_rows(q, k, v, rotations)
        dropped = q.shape[-1] - self.formats[layer].head_dim
        if dropped:
            rotated = tuple(x[..., :-dropped].contiguous() for x in rotated)
        out = super().attend(layer, pool, batch, *rotated)
        if dropped:
            out = F.pad(out, (0, dropped))
        return (
            rows.cast(out, q.dtype) if rotations.out is None else rows.rotate_heads(out, rotations.out, dtype=q.dtype)
        )
