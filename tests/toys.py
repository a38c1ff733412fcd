"""Codecs for tests only: each is a factory, and joins `CODECS` by one row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hack_kernels.base import Backend
from hack_kernels.hack_format import HackFormat
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from torch import Tensor

from hackkv.codec import AttentionWeights, KvCodec
from hackkv.codecs import make_zack, rotated
from hackkv.codecs.artifact import read_artifact
from hackkv.codecs.paged import Kept, PagedCodec, Settings
from hackkv.config import Frozen
from hackkv.types import KvShape
from tests.codecs.calibrations import projection_file


class LayeredSettings(Frozen):
    """Settings of `toy-layers`."""

    page_tokens: int = 64


def make_layered(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """Formats that differ by layer: K has 4 bits in layer 0 and 2 bits elsewhere."""
    page_tokens = LayeredSettings.model_validate(settings).page_tokens
    formats = [HackFormat(shape.head_dim, page_tokens, k_bits=bits) for bits in (4, 2)]
    first, other = (Kept(fmt, backend.kernels_for(fmt, HackReference)) for fmt in formats)
    layers = (first, *[other] * (shape.num_layers - 1))
    return PagedCodec(name, layers, backend, (("page_tokens", str(page_tokens)),))


def make_with_exact_layer(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec `rot-*` that leaves its second layer exact, if it has one."""
    return rotated.make_rotated(name, shape, backend, {"exact_layers": "1" if shape.num_layers > 1 else "", **settings})


def make_projected(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """`zack` with random projections that belong to no model, unless the settings name others."""
    if "calibration" in settings:
        return make_zack(name, shape, backend, settings)
    file = projection_file(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    codec = make_zack(name, shape, backend, {"calibration": str(file), **settings})
    codec.origin = None
    return codec


class RotatedSettings(Frozen):
    """Settings of `toy-rotated`."""

    rotations: str
    """File with `layers.{l}.rotation` [D, D], orthogonal."""
    page_tokens: int = 64


def make_rotated(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """Codec `fp16`, but V is stored rotated by matrices of a calibration file, which are folded into W_v and W_o."""
    chosen = RotatedSettings.model_validate(settings)
    artifact = read_artifact(Path(chosen.rotations))
    square = (shape.head_dim, shape.head_dim)
    rotations = tuple(artifact.tensor(f"layers.{layer}.rotation", square) for layer in range(shape.num_layers))
    fmt = RowFormat(shape.head_dim, chosen.page_tokens)
    kept = Kept(fmt, backend.kernels_for(fmt, RowReference))
    written = (("page_tokens", str(chosen.page_tokens)), ("rotations", artifact.digest))
    return RotatedCodec(name, (kept,) * shape.num_layers, backend, written, rotations, shape)


class RotatedCodec(PagedCodec):
    """V' = R^T V. The heads' outputs are sums of V', so with W_o' = W_o R the model computes the same as before."""

    prepares_weights = True

    def __init__(
        self,
        name: str,
        layers: tuple[Kept, ...],
        backend: Backend,
        settings: Settings,
        rotations: tuple[Tensor, ...],
        shape: KvShape,
    ) -> None:
        super().__init__(name, layers, backend, settings)
        self.rotations = rotations
        self._v_rows = shape.num_kv_heads * shape.head_dim

    def prepare_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        rotation = self.rotations[layer].double()
        qk, v = weights.qkv[: -self._v_rows], weights.qkv[-self._v_rows :]
        heads = v.double().unflatten(0, (-1, rotation.shape[0]))  # [Hkv, D, hidden]
        turned = torch.einsum("dr,hdi->hri", rotation, heads).flatten(0, 1).to(v.dtype)
        out = weights.out.double().unflatten(1, (-1, rotation.shape[0])) @ rotation  # [hidden, Hq, D]
        bias = weights.qkv_bias
        if bias is not None:
            parts = bias[-self._v_rows :].double().unflatten(0, (-1, rotation.shape[0])) @ rotation
            bias = torch.cat((bias[: -self._v_rows], parts.flatten().to(bias.dtype)))
        changed = out.flatten(1).to(weights.out.dtype)
        return replace(weights, qkv=torch.cat((qk, turned)), qkv_bias=bias, out=changed)


def hadamard(size: int) -> Tensor:
    """The orthogonal Hadamard matrix [size, size], size a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul_(size**-0.5)
