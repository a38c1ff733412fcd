"""Models of the Llama family: `load_model` gives a `Llama`, whose forward pass is a pure function of its inputs."""

from __future__ import annotations

from pathlib import Path

import torch
from hack_kernels.base import RowKernels
from torch import Tensor

from hackkv.codec import AttentionWeights
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.dtypes import CPU, DTYPES, check_dtype
from hackkv.model.fused import OnBytes
from hackkv.model.identity import model_hash
from hackkv.model.linear import has_fast_products, packed
from hackkv.model.llama import Attend, Llama, flat_positions
from hackkv.model.sampler import SamplerState, prompt_logprobs, sample
from hackkv.model.shipped import ModelFolder, find_model
from hackkv.model.weights import Loading, PrepareWeights, load_weights, progress_bar

__all__ = [
    "DTYPES",
    "Attend",
    "Llama",
    "ModelFolder",
    "ModelSpec",
    "SamplerState",
    "check_dtype",
    "find_model",
    "flat_positions",
    "load_model",
    "model_hash",
    "progress_bar",
    "prompt_logprobs",
    "read_spec",
    "sample",
    "unchanged",
]


def _silent(done: int, total: int) -> None:
    """Report no progress."""


def unchanged(layer: int, weights: AttentionWeights) -> AttentionWeights:
    """The weights as the checkpoint has them: what `prepare` is for a codec that folds nothing."""
    return weights


def _as_read(weight: Tensor) -> Tensor:
    return weight


def load_model(
    folder: Path,
    dtype: str = "bfloat16",
    *,
    device: torch.device = CPU,
    max_context: int = 0,
    batch_invariant: bool | None = None,
    kernels: RowKernels | None = None,
    on_bytes: OnBytes = _silent,
    prepare: PrepareWeights = unchanged,
) -> Llama:
    """Read, check and load the checkpoint in `folder`.

    `max_context` 0 takes the checkpoint's limit. `batch_invariant` None means: on a CPU, unless it has instructions for
    products of `dtype`, which the library uses and our own products do not. `kernels` are those of `Llama`, `prepare`
    is a codec's. Raises `CheckpointError` that names the file and tensor or field, `ConfigError` for a dtype that we do
    not compute in.
    """
    check_dtype(dtype, device)
    spec = read_spec(folder, max_context)
    if batch_invariant is None:
        batch_invariant = device.type == "cpu" and not has_fast_products(DTYPES[dtype])
    arrange = _as_read if batch_invariant else packed
    weights = load_weights(folder, spec, Loading(DTYPES[dtype], device, on_bytes, prepare, arrange))
    return Llama(spec, weights, batch_invariant=batch_invariant, kernels=kernels)
