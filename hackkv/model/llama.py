"""The forward pass of the Llama family, as a pure function of (ids, positions, attend).

    x = embed[ids]
    for each layer:  q, k, v = rotate(norm(qkv @ rms(x)));  x += out @ attend(layer, q, k, v)
                     g, u = gate_up @ rms(x);               x += down @ (silu(g) * u)
    hidden = rms(x);  logits = lm_head @ hidden[rows]

T is a flat, ragged batch: the tokens of many sequences one after another, each with its own position. `attend` decides
which tokens see each other and where KV lives; the model keeps no state. Norms and rotations are computed in float32
whatever the dtype of the weights.

Batch invariance. A library's matrix product may round a row differently depending on how many rows stand beside it and
on the number of threads: each processor has its own rules. `RowKernels.product` forms every sum in one order, so a
model that uses no other products gives the same greedy tokens in any batch (`hackkv.model.products`).
Rejected: padding the rows to whole groups, which held on AMD's processors and not on Intel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from hack_kernels.base import RowKernels
from hack_kernels.block_weight import WIDTHS, BlockWeight, Weight
from hack_kernels.rowwise import Rowwise
from torch import Tensor

from hackkv.model.config import ModelSpec
from hackkv.model.products import NEVER
from hackkv.model.rope import Rope

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D], all in the model's dtype and after rotation.
Heads of a token are contiguous, tokens lie apart: q, k and v are views of one tensor. The result is contiguous. In the
last layer it may have only the rows that are wanted."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in]."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Weight
    """[(Hq + 2 Hkv) * D, hidden]: the rows of Q, then K, then V."""
    qkv_bias: Tensor | None
    """[(Hq + 2 Hkv) * D]"""
    qk_norm: Tensor | None
    """[Hq + Hkv, D]: the norm weight of Q repeated for each query head, then that of K for each KV head."""
    out: Weight
    """[hidden, Hq * D]"""
    ffn_norm: Tensor
    """[hidden]"""
    gate_up: Weight
    """[2 * ffn, hidden]"""
    down: Weight
    """[hidden, ffn]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model on one device. Those that are not packed have one dtype."""

    embed: Weight
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    lm_head: Weight
    """[vocab, hidden]"""

    @property
    def packed_bits(self) -> frozenset[int]:
        """Bits of the codes of packed matrices."""
        return frozenset(each.bits for each in self._all() if isinstance(each, BlockWeight))

    @property
    def nbytes(self) -> int:
        """Memory of all tensors; one that serves twice counts once."""
        return sum({each.data.data_ptr(): each.nbytes for each in self._all()}.values())

    def _all(self) -> Iterator[Weight]:
        layers = (getattr(layer, each.name) for layer in self.layers for each in fields(layer))
        return (each for each in (self.embed, self.final_norm, self.lm_head, *layers) if each is not None)


class Llama:
    """A decoder of the Llama family over plain tensors. Safe to call from several threads: it holds no state.

    Weights need no gradients. A caller of many small steps enters `torch.inference_mode` once per step.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, *, library_rows: int = NEVER, kernels: RowKernels | None = None
    ) -> None:
        """`kernels` compute all operations on rows; the default is torch. From `library_rows` rows on the library
        multiplies in their place; `NEVER` makes every row of the result independent of the rows beside it, bit for bit.
        """
        self.spec = spec
        self.weights = weights
        self.library_rows = library_rows
        self.unpack_rows: Mapping[int, int] = dict.fromkeys(WIDTHS, NEVER)
        """Bits of a packed weight -> rows from which on it is unpacked, for one call, and the library multiplies."""
        self.device = weights.embed.device
        self.dtype = weights.final_norm.dtype
        self.kernels = kernels or Rowwise()
        self._mixed = spec.num_heads * spec.head_dim
        self._cos_sin = rotation_table(spec.rope, spec.max_context, self.device)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, for `ids` and `positions`, both int64 [T].

        `attend` is called once per layer, in order, with exactly T rows. With `rows` (int64 [R]) only these rows pass
        through the last layer's feed-forward and are returned, [R, hidden]; the others contribute K and V there, and
        nothing else if `attend` gives `rows` alone.
        """
        cos_sin = self.kernels.take(self._cos_sin, positions)
        layers = self.weights.layers
        x = self._embedded(ids)
        normed = self._norm(x, layers[0].input_norm)
        for index, layer in enumerate(layers):
            mixed = attend(index, *self._qkv(layer, normed, cos_sin)).view(-1, self._mixed)
            last = index + 1 == len(layers)
            if rows is not None and last:
                x, mixed = x[rows], mixed if len(mixed) == len(rows) else mixed[rows]
            next_norm = self.weights.final_norm if last else layers[index + 1].input_norm
            normed = self._finish(layer, x, mixed, next_norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] for `hidden` [rows, hidden]; pass only the rows that need a next token."""
        return self._product(hidden, self.weights.lm_head)

    def _embedded(self, ids: Tensor) -> Tensor:
        embed = self.weights.embed
        if isinstance(embed, BlockWeight):
            return self.kernels.unpack(embed, self.dtype, ids)
        return self.kernels.take(embed, ids)

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if self._is_ours(weight, x.shape[0]):
            return self.kernels.product(x, weight, bias)
        return F.linear(x, self.kernels.unpack(weight, x.dtype) if isinstance(weight, BlockWeight) else weight, bias)

    def _is_ours(self, weight: Weight, rows: int) -> bool:
        """Whether our kernels multiply, not the library."""
        return rows < (self.unpack_rows[weight.bits] if isinstance(weight, BlockWeight) else self.library_rows)

    def _norm(self, x: Tensor, weight: Tensor, more: Tensor | None = None) -> Tensor:
        return self.kernels.norm(x, weight, self.spec.rms_eps, more)

    def _qkv(self, layer: LayerWeights, normed: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V [T, heads, D] of the rows of `normed`, for `cos_sin` [T, D]."""
        spec, tokens = self.spec, cos_sin.shape[0]
        rotated_heads = spec.num_heads + spec.num_kv_heads
        qkv = self._product(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(tokens, rotated_heads + spec.num_kv_heads, spec.head_dim)
        if layer.qk_norm is not None:
            qk = heads[:, :rotated_heads]
            qk.copy_(F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps) * layer.qk_norm)
        self.kernels.rotate(heads, rotated_heads, cos_sin)
        q, k, v = heads.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor, next_norm: Tensor) -> Tensor:
        """Add the rest of the layer to x, in place, after attention gave `mixed`; returns the next layer's norm."""
        matrices = (layer.out, layer.gate_up, layer.down)
        if all(self._is_ours(each, x.shape[0]) for each in matrices):
            return self.kernels.finish_layer(x, mixed, matrices, (layer.ffn_norm, next_norm), self.spec.rms_eps)
        normed = self._norm(x, layer.ffn_norm, self._product(mixed, layer.out))
        both = self._product(normed, layer.gate_up)
        return self._norm(x, next_norm, self._product(self.kernels.gate(both), layer.down))


def rotation_table(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """cos and then sin of every channel pair at every position, float32 [positions, D]."""
    inverse = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.scale)


def flat_positions(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """int64 [T] positions of a ragged batch whose i-th sequence holds positions [start, stop)."""
    positions = [position for start, stop in spans for position in range(start, stop)]
    return torch.tensor(positions, dtype=torch.int64, device=device)
