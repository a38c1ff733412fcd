"""The two forms of a checkpoint hold the same rows; a fused file is a sound safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hack_kernels.block_weight import as_numbers
from safetensors.torch import load_file
from torch import Tensor

from hackkv.model import load_model, read_spec
from hackkv.model.config import FAMILIES
from hackkv.model.fused import fused_bytes, write_fused
from hackkv.model.layout import fused_parts, fused_shapes, split_shapes
from hackkv.model.tiny import Tiny


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_fused_file_holds_the_rows_of_the_split_one(
    architecture: str, make_tiny: Callable[[Tiny], Path], tmp_path: Path
) -> None:
    folder = make_tiny(Tiny(architecture))
    spec, split = read_spec(folder), load_file(folder / "model.safetensors")

    def rows(name: str) -> Iterator[Tensor]:
        yield from split[name].split(50)

    write_fused(tmp_path / "model.safetensors", spec, torch.float32, rows, lambda done, total: None)
    fused = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in fused.items()} == fused_shapes(spec)
    for name, parts in fused_parts(spec).items():
        assert torch.equal(fused[name], torch.cat([split[part] for part in parts]))
    assert sorted(part for parts in fused_parts(spec).values() for part in parts) == sorted(split_shapes(spec))
    assert fused_bytes(spec, torch.float32) == sum(tensor.nbytes for tensor in fused.values())
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    ours, theirs = load_model(tmp_path, "float32").weights, load_model(folder, "float32").weights
    assert all(
        torch.equal(as_numbers(a.qkv), as_numbers(b.qkv)) for a, b in zip(ours.layers, theirs.layers, strict=True)
    )
