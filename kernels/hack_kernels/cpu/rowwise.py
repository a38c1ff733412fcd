"""A model's operations on rows, one C++ call each. The binding checks the arguments, because a check costs more in
Python than in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.block_weight import BlockWeight, Matrices, Norms, Weight
from hack_kernels.choosing import ChoiceInput, ChoiceRules, Chooser, Scores
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.recorder import CpuRecorder
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.page_selection import BoundedPages
from hack_kernels.recorder import Recorder
from hack_kernels.rowwise import Rowwise


class RowwiseCpu(Rowwise):
    """Implements `RowKernels`. It inherits operations that are rare or as fast in torch."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """A product in which every sum has one order. The weight is read as it rests."""
        if isinstance(weight, BlockWeight):
            out = x.new_empty(x.shape[0], weight.rows)
            self._native.block_product(x, weight.data, bias, out)
            return out
        out = x.new_empty(x.shape[0], weight.shape[0])
        self._native.product(x, weight, bias, out)
        return out

    def finish_layer(self, x: Tensor, mixed: Tensor, matrices: Matrices, norms: Norms, epsilon: float) -> Tensor:
        """One C++ call for six operations, which saves the time of five calls in Python."""
        room, out = x.new_empty(x.shape[0], x.shape[1] + 3 * matrices[2].shape[1]), torch.empty_like(x)
        self._native.finish_layer(x, mixed, tuple(map(_data, matrices)), *norms, epsilon, room, out)
        return out

    def recorder(self) -> Recorder | None:
        """A recorder of C++ calls, which makes them again without Python."""
        return CpuRecorder()

    def take(self, table: Tensor, ids: Tensor) -> Tensor:
        """Row by row."""
        out = table.new_empty(len(ids), table.shape[1])
        self._native.take(table, ids, out)
        return out

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """One pass over the heads."""
        if x.dtype == dtype:
            return x
        out = torch.empty(x.shape, dtype=dtype)
        self._native.turn_heads(((x, None, None, False, out),))
        return out

    def unpack(self, weight: BlockWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """One pass over the codes."""
        out = torch.empty(weight.rows if ids is None else len(ids), weight.shape[1], dtype=dtype)
        self._native.unpack(weight.data, weight.rows, ids, out)
        return out

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """One C++ call; rows stay in the first-level cache."""
        out = torch.empty_like(x)
        self._native.norm(x, more, weight, epsilon, out)
        return out

    def rotate(self, x: Tensor, heads: int, cos_sin: Tensor) -> None:
        """One pass over each row, bit-equal to torch."""
        self._native.rotate(x, heads, cos_sin)

    def lay_out(self, matrices: Tensor) -> Tensor:
        """Column-major: all outputs' factors of a channel of x are neighbors."""
        return _columns(matrices).mT

    def rotate_heads(
        self, x: Tensor, matrices: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Every sum goes over the channels in order."""
        out = torch.empty(x.shape, dtype=dtype)
        self._native.turn_heads(((x, _columns(matrices), shift, False, out),))
        return out

    def rotate_rows(self, q: Tensor, k: Tensor, v: Tensor, rotations: HeadRotations) -> tuple[Tensor, Tensor, Tensor]:
        """One C++ call for Q, K and V, which reads them as they lie."""
        to_q, to_k, to_v = (torch.empty(x.shape, dtype=torch.float32) for x in (q, k, v))
        query, key = _columns(rotations.query), _columns(rotations.key)
        value = None if rotations.value is None else _columns(rotations.value)
        of_q, of_k = (q, query, None, False, to_q), (k, key, rotations.shift, True, to_k)
        self._native.turn_heads((of_q, of_k, (v, value, None, True, to_v)))
        return to_q, to_k, to_v

    def gate(self, x: Tensor) -> Tensor:
        """One pass over each row."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._native.gate(x, out)
        return out

    def votes(self, q: Tensor, keys: Tensor, first: int) -> Tensor:
        """One C++ call. Each thread has votes of its own, so that none waits."""
        heads, total, dim = keys.shape
        group, scale = q.shape[1] // heads, math.log2(math.e) / math.sqrt(dim)
        queries = (q.float() * scale).unflatten(1, (heads, group)).transpose(0, 1).flatten(1, 2).contiguous()
        found = torch.zeros(self._native.threads, heads, total, dtype=torch.int64)
        self._native.count_votes(queries, keys.float().contiguous(), first, group, found)
        return found.sum(0)

    def select_pages(self, q: Tensor, pages: BoundedPages, counts: Tensor, alpha: float, *, halve: bool) -> Tensor:
        """One C++ call; heads are divided among threads."""
        if q.shape[-1] % 16:
            return super().select_pages(q, pages, counts, alpha, halve=halve)
        table = pages.table.new_empty(q.shape[0], pages.least.shape[1], pages.table.shape[1])
        bounds = (pages.least, pages.most)
        where = (pages.table.contiguous(), pages.sealed, counts)
        self._native.select_pages(q.float().contiguous(), *bounds, *where, alpha, halve, table)
        return table

    def new_chooser(self, rules: ChoiceRules, prompt_ids: Sequence[int]) -> Chooser:
        """A C++ object with the rules and the ids that they need."""
        made: Chooser = compiled().chooser(rules, prompt_ids)
        return made

    def choose(self, given: ChoiceInput) -> list[int]:
        """Greedy rows take one pass. Other rows select few candidates before they sort."""
        found: list[int] = self._native.choose(given.logits, given.choosers, given.faulty, given.allowed)
        return found

    def score(self, logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[Scores]:
        """Rows are divided among threads."""
        found: list[Scores] = self._native.score(logits, ids, tops)
        return found

    def append(self, pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> None:
        """Each row is rounded in scratch memory before it is written."""
        window = (pool.window.sink, pool.window.recent)
        self._native.append(pool.open_k, pool.open_v, spans.starts, spans.slots, k, v, *window, faulty)

    def narrow(self, k: Tensor, v: Tensor, spans: Spans, faulty: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over each row."""
        narrow_k, narrow_v = (torch.empty(x.shape, dtype=torch.float16) for x in (k, v))
        self._native.narrow(k, v, spans.counts, faulty, narrow_k, narrow_v)
        return narrow_k, narrow_v


def _data(weight: Weight) -> Tensor:
    return weight.data if isinstance(weight, BlockWeight) else weight


def _columns(matrices: Tensor) -> Tensor:
    """Columns of matrices [G, D, D] as contiguous rows [G, D, D]; a copy unless `RowwiseCpu.lay_out` made them."""
    return matrices.mT.contiguous()
