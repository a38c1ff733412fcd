"""Everything that a prefill or decode node loads before it opens a port."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass

import torch
from hack_kernels import load
from hack_kernels.base import Backend, BackendUnavailable

from hackkv.codec import KvCodec
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.footprint import Footprint, footprint_of
from hackkv.model import check_dtype, load_model
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.identity import model_hash
from hackkv.model.llama import Llama
from hackkv.model.shipped import ModelFolder, find_model
from hackkv.model.weights import check_weights, progress_bar
from hackkv.types import WIRE_FORM, Fingerprint, KvLayout

log = logging.getLogger(__name__)

WIRE_VERSION = "3"
"""Version of all that two nodes must agree on, down to the codes that stochastic rounding gives."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model with its codec, and the fingerprint that peers compare."""

    name: str
    model: Llama
    codec: KvCodec
    fingerprint: Fingerprint
    kernels: str
    """Backend and instruction set of the kernels, and who computes on pages if the backend does not; for display."""

    @property
    def layout(self) -> KvLayout:
        """The shape of the KV cache."""
        return self.model.spec.kv_layout(self.codec.page_tokens)

    @property
    def footprint(self) -> Footprint:
        """The sizes of sequences."""
        return footprint_of(self.codec, self.layout)

    def pages_in(self, kv_bytes: int) -> int:
        """How many pages, each of all layers and KV heads, fit in `kv_bytes`.

        Raises `ConfigError` when not even one page fits, or when the machine has less memory: the system would grant
        the allocation and kill the process when it is used.
        """
        page_bytes = self.footprint.page_bytes
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
    folder, spec, kv_codec, backend = _checked(model, codec)
    with progress_bar(f"loading {folder.name}") as on_bytes:
        llama = load_model(
            folder.path,
            model.dtype,
            device=backend.device,
            max_context=model.max_context,
            kernels=backend.rows,
            on_bytes=on_bytes,
            prepare=kv_codec.prepare_weights,
        )
    fields = (
        ("wire_version", WIRE_VERSION),
        ("model_hash", model_hash(folder.path)),
        ("dtype", model.dtype),
        ("layers", str(spec.num_layers)),
        ("kv_heads", str(spec.num_kv_heads)),
        ("head_dim", str(spec.head_dim)),
        *kv_codec.fingerprint(),
        (WIRE_FORM, kv_codec.wire_form.name),
    )
    return Worker(folder.name, llama, kv_codec, Fingerprint(fields), _kernels(backend, kv_codec))


def check_worker(model: ModelConfig, codec: CodecConfig) -> None:
    """Raise the errors of `load_worker` in settings, files and headers, without reading a weight."""
    folder, spec, _, _ = _checked(model, codec)
    check_weights(folder.path, spec)


def _checked(model: ModelConfig, codec: CodecConfig) -> tuple[ModelFolder, ModelSpec, KvCodec, Backend]:
    if model.device and not re.fullmatch(r"cpu|cuda(:\d+)?", model.device):
        raise ConfigError(f"model.device: {model.device!r} is not a device; known: cpu, cuda, cuda:N")
    try:
        backend = load(model.backend, torch.device(model.device) if model.device else None)
    except (BackendUnavailable, ImportError) as error:
        raise ConfigError(f"model.backend: {error}") from error
    check_dtype(model.dtype, backend.device)
    if backend.device.type != "cpu":
        raise ConfigError(
            f"model.backend: {model.backend!r} computes on {backend.device}, but the engine of this version on the "
            "processor: use cpu or reference"
        )
    folder = find_model(model.path, model.dtype)
    spec = read_spec(folder.path, model.max_context)
    kv_codec = make_codec(codec, spec.kv_shape, backend)
    log.info("model %s, codec %s on backend %s", folder.name, kv_codec.name, _kernels(backend, kv_codec))
    return folder, spec, kv_codec, backend


def _kernels(backend: Backend, codec: KvCodec) -> str:
    """Who computes, for display: names the format's definition where the backend has no kernels for a page format."""
    pages = "" if codec.served_by == backend.name else f", pages by {codec.served_by}"
    return f"{backend.name} ({backend.isa}{pages})"
