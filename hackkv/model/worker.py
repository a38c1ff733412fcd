"""Everything that a prefill or decode node loads before it opens a port."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from hack_kernels import load
from hack_kernels.base import BackendUnavailable, HackKernels

from hackkv.codec import KvCodec
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model import check_dtype, load_model
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.identity import model_hash
from hackkv.model.llama import Llama
from hackkv.model.shipped import ModelFolder, find_model
from hackkv.model.weights import check_weights, progress_bar
from hackkv.types import Fingerprint, KvLayout

log = logging.getLogger(__name__)

WIRE_VERSION = "2"
"""Of everything that two nodes must mean alike, down to the codes that stochastic rounding gives."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model with its codec, and what it must agree on with its peers."""

    name: str
    model: Llama
    codec: KvCodec
    fingerprint: Fingerprint
    kernels: str
    """Backend and instruction set of the kernels, for people."""

    @property
    def layout(self) -> KvLayout:
        """The shape of the KV cache."""
        return self.model.spec.kv_layout(self.codec.format.page_tokens)

    def pages_in(self, kv_bytes: int) -> int:
        """How many pages, of all layers and KV heads, fit.

        Raises `ConfigError` when not even one does, or when the machine has no such memory: the system would grant it
        and kill us while we use it.
        """
        layout = self.layout
        page_bytes = self.codec.format.resident_bytes * layout.num_layers * layout.num_kv_heads
        if kv_bytes < page_bytes:
            raise ConfigError(f"kv_bytes: {kv_bytes} is less than one page of {page_bytes} bytes")
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if kv_bytes > memory_bytes:
            raise ConfigError(f"kv_bytes: {kv_bytes} is more than this machine's memory of {memory_bytes} bytes")
        return kv_bytes // page_bytes


def load_worker(model: ModelConfig, codec: CodecConfig) -> Worker:
    """Load and check everything. Raises `ConfigError` or `CheckpointError` naming the setting, file or tensor.

    In FP32 the model is batch invariant, so that greedy output does not depend on what else the cluster is doing.
    """
    if model.threads:
        torch.set_num_threads(model.threads)
    folder, spec, kv_codec, kernels = _checked(model, codec)
    with progress_bar(f"loading {folder.name}") as on_bytes:
        llama = load_model(folder.path, model.dtype, max_context=model.max_context, kernels=kernels, on_bytes=on_bytes)
    fields = (
        ("wire_version", WIRE_VERSION),
        ("model_hash", model_hash(folder.path)),
        ("dtype", model.dtype),
        ("layers", str(spec.num_layers)),
        ("kv_heads", str(spec.num_kv_heads)),
        ("head_dim", str(spec.head_dim)),
        *kv_codec.fingerprint(),
    )
    return Worker(folder.name, llama, kv_codec, Fingerprint(fields), f"{kernels.name} ({kernels.isa})")


def check_worker(model: ModelConfig, codec: CodecConfig) -> None:
    """Find everything that `load_worker` would complain about, without reading a weight."""
    folder, spec, _, _ = _checked(model, codec)
    check_weights(folder.path, spec)


def _checked(model: ModelConfig, codec: CodecConfig) -> tuple[ModelFolder, ModelSpec, KvCodec, HackKernels]:
    check_dtype(model.dtype)
    try:
        kernels = load(model.backend)
    except (BackendUnavailable, ImportError) as error:
        raise ConfigError(f"model.backend: {error}") from error
    if kernels.device.type != "cpu":
        raise ConfigError(
            f"model.backend: {model.backend!r} computes on {kernels.device}, but the engine of this version on the "
            "processor: use cpu or reference"
        )
    folder = find_model(model.path)
    spec = read_spec(folder.path, model.max_context)
    kv_codec = make_codec(codec, spec.head_dim, kernels)
    log.info("model %s, codec %s on backend %s", folder.name, kv_codec.name, kernels.name)
    return folder, spec, kv_codec, kernels
