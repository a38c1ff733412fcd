"""Devices: those that a setting means, the memory that a node needs of one, and the KV that fits beside that.

On a GPU nothing is swapped and memory is taken when it is allocated. So every byte that a node will ever need is
counted before the node takes its pages.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Final

import torch
from hack_kernels import gpus, load
from hack_kernels.base import Backend, BackendUnavailable
from hack_kernels.limits import HELD_TOKENS

from hackkv.config import ModelConfig
from hackkv.errors import ConfigError
from hackkv.footprint import Footprint
from hackkv.model.config import ModelSpec
from hackkv.model.graphs import step_sizes
from hackkv.nodes import Busiest

log = logging.getLogger(__name__)

AUTO: Final = "auto"
ON_PROCESSOR_BYTES: Final = 256 << 20
"""Bytes of KV that `auto` takes on the processor, whose memory others use too."""
RESERVE: Final = 0.1
"""The share of a GPU's memory that stays free: CUDA's context, compiled kernels, the libraries' workspaces, gaps that
torch's allocator leaves."""


def places(model: ModelConfig) -> tuple[str, ...]:
    """The devices that `model.device` means, by torch's names, at least one: nodes of one machine take turns.

    Looks at GPUs unless the setting names the processor or one device, and so may open a context of CUDA, which does
    not survive a fork. Raises `ConfigError`.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", model.device):
        raise ConfigError(f"model.device: {model.device!r} is not a device; known: cpu, cuda, cuda:N, auto")
    if model.device == "cuda":
        return gpus().usable or ("cuda:0",)  # which the backend refuses, and says why
    if model.device != AUTO:
        return (model.device,)
    if model.backend != AUTO:
        return (str(backend_on(model.backend).device),)
    seen = gpus()
    if seen.found and not seen.usable:
        log.warning("model.device: auto takes the processor: %s", seen.missing(0))
    return seen.usable or ("cpu",)


def backend_on(name: str, device: str | None = None) -> Backend:
    """The kernels that `model.backend` names, for `device` or, if None, their own. Raises `ConfigError`."""
    try:
        return load(name, None if device is None else torch.device(device))
    except (BackendUnavailable, ImportError) as error:
        raise ConfigError(f"model.backend: {error}") from error


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes."""

    owner: str
    """The device or machine that has it, for messages."""
    total: int
    free: int
    swaps: bool = False
    """Whether memory is taken when it is used, not when it is allocated. If so, all of it counts as free."""


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of `device` now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(str(device), total, free)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceMemory("this machine", total, total, swaps=True)


def auto_kv_bytes(memory: DeviceMemory, weights: int, work: int, nodes: int) -> int:
    """Bytes for sealed pages on a GPU that `nodes` nodes share, each with an equal part, when the weights are loaded.

    `weights` bytes lie there already, `work` (passes, recorded steps and slots) are still to come. Nodes that start at
    the same moment see each other's memory as free, so each keeps to its part of the whole. May be negative.
    """
    part = int(memory.total * (1 - RESERVE)) // nodes
    return min(part - weights, memory.free - int(memory.total * RESERVE)) - work


def recorded_bytes(spec: ModelSpec, dtype: torch.dtype, footprint: Footprint, rows: int) -> int:
    """An upper bound of the bytes that recorded steps of up to `rows` rows take (`hackkv.model.graphs`).

    Steps share memory in which the largest one fits. In addition there are inputs, the hidden states of every size, and
    a page and a slot for padding.

    A program that seals a page of each sequence reads K and V of a layer from the slots twice, for their order.
    """
    pages = 8 * rows * -(-spec.max_context // footprint.page_tokens)
    sealed = 3 * rows * footprint.page_tokens * footprint.row_bytes // spec.num_layers
    spare = footprint.page_bytes + footprint.slot_bytes
    hidden = sum(step_sizes(rows)) * spec.hidden * dtype.itemsize
    return pass_bytes(spec, dtype, Busiest(0, rows, 0)) + pages + sealed + spare + hidden


def pass_bytes(spec: ModelSpec, dtype: torch.dtype, busiest: Busiest) -> int:
    """An upper bound of what a forward pass and the choice of its tokens take beside weights and pools.

    It counts as if nothing were freed within a layer. A row takes its hidden sizes (x, its norm, both branches), its
    feed-forward, and Q, K and V: as the product gives them, in FP16, and in FP32 and FP64 for codecs that rotate rows.
    Tokens are chosen from FP64 logits: as given, adjusted, ordered and weighed. Invariant products of FP32 copy their
    operands to FP64, the weight among them.
    """
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    copied = 8 if dtype == torch.float32 else 0
    row = (8 * spec.hidden + 3 * spec.ffn) * (dtype.itemsize + copied) + heads * (dtype.itemsize + copied + 32)
    choice = spec.vocab * (dtype.itemsize + copied + 8 * 8)
    matrix = spec.hidden * max(heads, 2 * spec.ffn, spec.vocab)
    return busiest.rows * row + busiest.choices * choice + copied * matrix


def held_bytes(spec: ModelSpec) -> int:
    """An upper bound of the bytes in which a prompt's attention on a GPU holds a layer's pages, beside `pass_bytes`.

    It reads K and V as FP16, of all pages of a sequence or of several up to `HELD_TOKENS`. As much again counts for
    the conversion of codes.
    """
    return 2 * 2 * 2 * max(spec.max_context, HELD_TOKENS) * spec.num_kv_heads * spec.head_dim
