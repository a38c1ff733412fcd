"""In float32, the hidden state and logits of a row are bit-equal whatever the rest of the batch is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hack_kernels.base import RowKernels
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.rowwise import Rowwise
from torch import Tensor

from hackkv.model import load_model
from hackkv.model.tiny import Tiny

MakeTiny = Callable[[Tiny], Path]


def own_value(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each row to itself only, so that only the model is under test."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) + 0.1 * q


@pytest.fixture(params=["reference", *supported_isas()])
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    return Rowwise() if request.param == "reference" else CpuBackend(request.param, threads=3).rows


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(hidden=64, heads=2, kv_heads=1, ffn=172),
        Tiny("Qwen3ForCausalLM"),
        Tiny("Qwen2ForCausalLM", layers=1, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=1376),
    ],
    ids=["odd", "qwen3", "wide"],
)
def test_rows_do_not_depend_on_their_batch(tiny: Tiny, make_tiny: MakeTiny, kernels: RowKernels) -> None:
    model = load_model(make_tiny(tiny), "float32", kernels=kernels)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 512, (260,), generator=generator)
    positions = torch.randint(0, 4096, (260,), generator=generator)
    hidden = model.forward(ids, positions, own_value)
    logits = model.logits(hidden)
    for start, size in [(0, 1), (3, 1), (259, 1), (5, 2), (8, 3), (1, 5), (2, 7), (0, 64), (7, 129), (100, 131)]:
        rows = slice(start, start + size)
        part = model.forward(ids[rows], positions[rows], own_value)
        assert torch.equal(part, hidden[rows])
        assert torch.equal(model.logits(part), logits[rows])


def test_rows_that_are_wanted_are_those_of_the_whole_batch(make_tiny: MakeTiny, kernels: RowKernels) -> None:
    model = load_model(make_tiny(Tiny()), "float32", kernels=kernels)
    ids, positions = torch.arange(3, 14), torch.arange(11)
    whole = model.forward(ids, positions, own_value)
    for rows in (torch.tensor([10]), torch.tensor([0, 4, 10]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(model.forward(ids, positions, own_value, rows), whole[rows])
