"""A model without weights for real nodes: a pass or step takes as long as a cost model says, and computes nothing.

Nodes built on this model are the project's own (`prefill_node`, `decode_node`) in every other respect: schedulers, page
books, frames on the wire, control calls. Their KV has the page size and page count of the model that is simulated, but
one layer and one head, so the wire carries frames of real form and few bytes. A token is a function of the token before
it and its position, so a replay gives the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from hack_kernels import load as load_backend
from hack_kernels.base import RowKernels
from torch import Tensor

from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.guide import Guides
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.llama import Attend, Llama, Weights
from hackkv.model.rope import Rope
from hackkv.model.worker import WIRE_VERSION, Worker
from hackkv.types import WIRE_FORM, Fingerprint
from sim.capacity import cost_of
from sim.costs import CostModel
from sim.sizes import sizes_of
from sim.spec import ReplicaPool, Spec

HEAD_DIM: Final = 64
"""Channels of the one head."""
_ANSWERS: Final = 256
"""Number of ids that are ever chosen. They begin after the last special id."""


class Weightless(Llama):
    """Sleeps for the cost of a pass or step. Rows of K and V are a function of their tokens."""

    def __init__(self, spec: ModelSpec, cost: CostModel, kernels: RowKernels) -> None:
        nothing = torch.zeros(1, 1)
        super().__init__(spec, Weights(nothing, (), nothing, nothing), kernels=kernels)
        self.cost = cost
        first = 1 + max((*spec.eos_ids, spec.bos_id or 0))
        self._first, self._answers = first, min(_ANSWERS, spec.vocab - first)
        self._kv = torch.sin(torch.arange(3.0 * _ANSWERS * HEAD_DIM)).view(_ANSWERS, 3, HEAD_DIM)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """The id that follows each row, as a float: [T, 1], or [R, 1] with `rows`. See `Llama.forward`."""
        is_pass = rows is not None
        time.sleep(self._seconds(positions.tolist(), is_pass=is_pass))
        if is_pass:  # a pass seals KV, which leaves; nobody would read rows that a step writes
            kv = self._kv.index_select(0, ids % _ANSWERS)
            attend(0, kv[:, :1], kv[:, 1:2], kv[:, 2:])
        following = (self._first + (ids + positions) % self._answers)[:, None].float()
        return following if rows is None else following[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab]: 1 at the id that follows, 0 elsewhere."""
        return torch.zeros(len(hidden), self.spec.vocab).scatter_(1, hidden.long(), 1.0)

    def following(self, token_id: int, position: int) -> int:
        """The greedy token that follows `token_id` at `position`."""
        return self._first + (token_id + position) % self._answers

    def _seconds(self, positions: list[int], *, is_pass: bool) -> float:
        chunks = list(_chunks(positions))
        if is_pass:
            return self.cost.prefill(chunks).seconds
        if len(chunks) < len(positions):
            return self.cost.replay(chunks)
        return self.cost.decode(len(chunks)).seconds(sum(positions), 1)


def _chunks(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive positions, as (first, count)."""
    first = 0
    for index, position in enumerate(positions):
        if index + 1 == len(positions) or positions[index + 1] != position + 1:
            yield positions[first], index + 1 - first
            first = index + 1


def weightless_worker(spec: Spec, pool: ReplicaPool, folder: Path) -> Worker:
    """A worker of `pool`, with the tokens and longest context of the checkpoint in `folder`; its weights are not read.

    Raises `ConfigError` or `CheckpointError` naming what cannot be used.
    """
    known = read_spec(folder)
    rope = Rope("default", 1.0, (1.0,) * (HEAD_DIM // 2), 1.0)
    thin = replace(
        known, num_layers=1, hidden=1, num_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, rope=rope, family="weightless"
    )
    backend = load_backend("auto")
    codec = make_codec(CodecConfig(name=spec.codec.name, settings=spec.codec.settings), thin.kv_shape, backend)
    fields = (
        ("wire_version", WIRE_VERSION),
        ("model_hash", f"weightless {spec.model if isinstance(spec.model, str) else 'shape'}"),
        ("layers", str(thin.num_layers)),
        ("kv_heads", str(thin.num_kv_heads)),
        ("head_dim", str(thin.head_dim)),
        *codec.fingerprint(),
        (WIRE_FORM, codec.wire_form.name),
    )
    model = Weightless(thin, cost_of(spec, pool, sizes_of(spec.codec, spec.shape.kv_shape)), backend.rows)
    guides = Guides(folder, sorted(known.eos_ids))
    return Worker(folder.name, model, codec, backend, Fingerprint(fields), "simulated", guides)
