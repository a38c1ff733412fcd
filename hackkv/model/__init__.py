"""Models of the Llama family: `load_model` gives a `Llama`, whose forward pass is a pure function of its inputs."""

from __future__ import annotations

from pathlib import Path

import torch
from hack_kernels.base import RowKernels

from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.dtypes import CPU, DTYPES, check_dtype
from hackkv.model.fused import OnBytes
from hackkv.model.identity import model_hash
from hackkv.model.llama import Attend, Llama, flat_positions
from hackkv.model.packing import NOTHING, Packing
from hackkv.model.products import NEVER
from hackkv.model.sampler import SamplerState, sample
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
    "read_spec",
    "sample",
]


def _silent(done: int, total: int) -> None:
    """Report no progress."""


def load_model(
    folder: Path,
    dtype: str = "bfloat16",
    *,
    device: torch.device = CPU,
    max_context: int = 0,
    packing: Packing = NOTHING,
    library_rows: int = NEVER,
    kernels: RowKernels | None = None,
    on_bytes: OnBytes = _silent,
    prepare: PrepareWeights | None = None,
) -> Llama:
    """Read, check and load the checkpoint in `folder`.

    `max_context` 0 takes the checkpoint's limit. `packing` is of matrices that the checkpoint has as numbers.
    `library_rows` and `kernels` are those of `Llama`. `prepare` is `KvCodec.prepare_weights` of a codec that folds
    something into the weights. Raises `CheckpointError` that names the file and tensor or field, `ConfigError` for a
    dtype that we do not compute in.
    """
    check_dtype(dtype, device)
    spec = read_spec(folder, max_context)
    weights = load_weights(folder, spec, Loading(DTYPES[dtype], device, on_bytes, packing, prepare))
    return Llama(spec, weights, library_rows=library_rows, kernels=kernels)
