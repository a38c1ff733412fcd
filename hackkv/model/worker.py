"""Everything that a prefill or decode node loads before it opens a port."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from hack_kernels.base import Backend
from tokenizers import Tokenizer

from hackkv.codec import KvCodec, Origin, rows_held
from hackkv.codec_footprint import footprint_of, fp16_bytes
from hackkv.codecs import calibrates, make_codec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import CalibrationMismatch, CheckpointError, ConfigError
from hackkv.footprint import Footprint
from hackkv.guide import Guides
from hackkv.heap import trim
from hackkv.model import check_dtype, load_model
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.device import (
    ON_PROCESSOR_BYTES,
    DeviceMemory,
    auto_kv_bytes,
    backend_on,
    held_bytes,
    memory_of,
    pass_bytes,
    places,
    recorded_bytes,
)
from hackkv.model.dtypes import DTYPES
from hackkv.model.identity import model_hash, source_hash
from hackkv.model.llama import Llama
from hackkv.model.packing import computed_in, packing_of
from hackkv.model.products import ALWAYS, NEVER, library_rows, unpack_rows
from hackkv.model.shipped import ModelFolder, find_model
from hackkv.model.weights import PrepareWeights, check_weights, progress_bar
from hackkv.nodes import Busiest, CodecLoss
from hackkv.packaged import CALIBRATIONS
from hackkv.types import WIRE_FORM, Fingerprint, KvLayout

log = logging.getLogger(__name__)

CALIBRATION: Final = "calibration"
"""The codec setting that names a calibration file."""

WIRE_VERSION = "7"
"""Version of all that two nodes must agree on, down to the codes that stochastic rounding gives."""

SHARE_TOKENS: Final = 2048
"""The length for which a codec's size is stated: exact pages are a smaller part of a longer sequence."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model with its codec, and the fingerprint that peers compare."""

    name: str
    model: Llama
    codec: KvCodec
    backend: Backend
    fingerprint: Fingerprint
    kernels: str
    """For display: backend and instruction set of the kernels, what computes on pages if the backend does not, and what
    multiplies."""
    guides: Guides
    """Grammars compiled for the model's vocabulary."""
    loss: CodecLoss | None = None
    """The loss of the codec on the model, if it was measured (`hackkv.canary`)."""

    @property
    def layout(self) -> KvLayout:
        """The shape of the KV cache."""
        return self.model.spec.kv_layout(self.codec.page_tokens)

    @property
    def footprint(self) -> Footprint:
        """The sizes of sequences."""
        return footprint_of(self.codec, self.layout)

    def pages_in(self, kv_bytes: int, *, prompts: bool = False) -> int:
        """The number of pages, of all layers and KV heads, that fit in `kv_bytes`; with `prompts` beside their notes.

        Raises `ConfigError` when not even one page fits, or when the device has less memory: the system would grant
        the allocation and kill the process when it is used.
        """
        page_bytes = self.footprint.page_bytes + (self.footprint.noted_bytes if prompts else 0)
        if kv_bytes < page_bytes:
            raise ConfigError(f"kv_bytes: {kv_bytes} is less than one page of {page_bytes} bytes")
        memory = memory_of(self.model.device)
        if kv_bytes > memory.free:
            raise ConfigError(f"kv_bytes: {kv_bytes} is more than {memory.owner}'s memory of {memory.free} bytes")
        return kv_bytes // page_bytes

    def auto_kv_bytes(self, busiest: Busiest, nodes: int, memory: DeviceMemory) -> int:
        """Bytes that `kv_bytes: auto` takes of the memory of the model's device, which `nodes` nodes share.

        Raises `ConfigError` with the sums if that is less than a page.
        """
        model = self.model
        if memory.swaps:
            return ON_PROCESSOR_BYTES
        work = pass_bytes(model.spec, model.dtype, busiest) + held_bytes(model.spec)
        work += busiest.slots * self.footprint.slot_bytes
        if busiest.recorded:
            work += recorded_bytes(model.spec, model.dtype, self.footprint, busiest.recorded)
        found = auto_kv_bytes(memory, model.weights.nbytes, work, nodes)
        if found < self.footprint.page_bytes:
            raise ConfigError(
                f"kv_bytes: auto finds no room for a page: {memory.owner} has {memory.total} bytes for {nodes} nodes, "
                f"{memory.free} of them are free, this node's weights take {model.weights.nbytes} and its work {work}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A worker whose settings, files and headers are checked, and whose weights are not read yet."""

    config: ModelConfig
    folder: ModelFolder
    spec: ModelSpec
    codec: KvCodec
    backend: Backend

    @property
    def kernels(self) -> str:
        """The kernels that compute, for display. Where the backend has none for a format, it names the definition."""
        backend, served_by = self.backend, self.codec.served_by
        pages = "" if served_by == backend.name else f", pages by {served_by}"
        return f"{backend.name} ({backend.isa}{pages})"

    @property
    def share(self) -> float:
        """Bytes at rest of a sequence of `SHARE_TOKENS` tokens, exact pages among them, as a share of FP16's."""
        layout = self.spec.kv_layout(self.codec.page_tokens)
        sizes = footprint_of(self.codec, layout)
        return sizes.resting_bytes(rows_held(self.codec, SHARE_TOKENS)) / fp16_bytes(layout, SHARE_TOKENS)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint that peers compare. Reads parts of the weights. Raises `CheckpointError`."""
        spec = self.spec
        return Fingerprint(
            (
                ("wire_version", WIRE_VERSION),
                ("model_hash", model_hash(self.folder.path)),
                ("dtype", computed_in(self.config.dtype, self.config.weights)),
                ("layers", str(spec.num_layers)),
                ("kv_heads", str(spec.num_kv_heads)),
                ("head_dim", str(spec.head_dim)),
                *self.codec.fingerprint(),
                (WIRE_FORM, self.codec.wire_form.name),
            )
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the checkpoint puts around a text. Raises `CheckpointError`."""
        path = self.folder.path / "tokenizer.json"
        try:
            core = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception; all of them mean a bad file
            raise CheckpointError(f"{path}: {error}") from error
        core.no_truncation()
        return list(core.encode(text).ids)

    def load(self) -> Llama:
        """The model with what the codec folds into its weights. Raises `CheckpointError` naming file and tensor."""
        return self._load(self.codec.prepare_weights if self.codec.prepares_weights else None)

    def worker(self) -> Worker:
        """The worker with its weights. Raises `CheckpointError` naming file and tensor."""
        llama = self.load()
        guides = Guides(self.folder.path, sorted(self.spec.eos_ids))
        kernels = f"{self.kernels}, {_products(llama)}"
        trim()  # loading frees some 50 MiB; how much of it stays depends on what lies above it
        return Worker(self.folder.name, llama, self.codec, self.backend, self.fingerprint(), kernels, guides)

    def load_plain(self) -> Llama:
        """The model as its checkpoint has it. Raises `CheckpointError` naming file and tensor."""
        return self._load(None)

    def _load(self, prepare: PrepareWeights | None) -> Llama:
        config, rows = self.config, self.backend.rows
        with progress_bar(f"loading {self.folder.name}") as on_bytes:
            model = load_model(
                self.folder.path,
                config.dtype,
                device=self.backend.device,
                max_context=config.max_context,
                packing=packing_of(config.weights, config.dtype, self.backend.device.type),
                kernels=rows,
                on_bytes=on_bytes,
                prepare=prepare,
                library_rows=self._library_rows(partial(library_rows, rows.product)),
            )
        model.unpack_rows = {
            bits: self._library_rows(partial(unpack_rows, rows, bits)) for bits in sorted(model.weights.packed_bits)
        }
        return model

    def _library_rows(self, measured: Callable[[torch.dtype, str], int]) -> int:
        """`Llama.library_rows` as `ModelConfig.batch_invariant` says; `measured` times both kinds of products."""
        config, backend = self.config, self.backend
        invariant = config.dtype == "float32" if config.batch_invariant is None else config.batch_invariant
        if invariant:
            return NEVER
        if backend.device.type != "cpu":
            return ALWAYS
        return measured(DTYPES[config.dtype], backend.isa)


def load_worker(model: ModelConfig, codec: CodecConfig) -> Worker:
    """Load and check everything. Raises `ConfigError` or `CheckpointError` naming the setting, file or tensor.

    In FP32 the model is batch invariant unless the settings say otherwise, so that greedy output does not depend on
    what else the cluster is doing.
    """
    if model.threads:
        torch.set_num_threads(model.threads)
    planned = plan_worker(model, codec)
    log.info("model %s, codec %s on backend %s", planned.folder.name, planned.codec.name, planned.kernels)
    if planned.backend.device.type != "cpu" and planned.codec.served_by != planned.backend.name:
        # No refusal: answers are right, and a codec serves on a GPU on the day it is written.
        log.warning(
            "codec %s: backend %s has no kernels for its pages; their definition in torch serves them, slowly",
            planned.codec.name,
            planned.backend.name,
        )
    return planned.worker()


def _products(llama: Llama) -> str:
    """The forms of packed weights, and who multiplies, for display."""
    takeovers = {"": llama.library_rows, **{f"int{bits}": rows for bits, rows in llama.unpack_rows.items()}}
    packed = [form for form in takeovers if form]
    who = "batch invariant"
    if any(rows != NEVER for rows in takeovers.values()):
        said = (f"{form} {max(rows, 1)}".strip() for form, rows in takeovers.items() if rows != NEVER)
        who = f"the library's products from {', '.join(said)} rows on"
    return f"weights {' and '.join(packed)}, {who}" if packed else who


def check_worker(model: ModelConfig, codec: CodecConfig) -> None:
    """Raise the errors of `load_worker` in settings, files and headers, without reading a weight."""
    planned = plan_worker(model, codec)
    check_weights(planned.folder.path, planned.spec)


def with_calibration(codec: CodecConfig, folder: ModelFolder) -> CodecConfig:
    """`codec` with the calibration that ships for the model in `folder`, if there is one and the settings have none."""
    if not calibrates(codec) or CALIBRATION in codec.settings:
        return codec
    file = CALIBRATIONS / f"{source_hash(folder.path)}.safetensors"
    if not file.is_file():
        return codec
    return codec.model_copy(update={"settings": {**codec.settings, CALIBRATION: str(file)}})


def check_origin(origin: Origin, folder: ModelFolder) -> None:
    """Raise `CalibrationMismatch` unless the calibration was made for the model in `folder`."""
    if not origin.model_hash:
        raise CalibrationMismatch(
            f"{origin.path}: does not say which model it is of; hackkv calibrate writes one that does"
        )
    if (ours := source_hash(folder.path)) != origin.model_hash:
        raise CalibrationMismatch(
            f"{origin.path}: made for {origin.model or 'another model'} ({origin.model_hash[:12]}), "
            f"not for {folder.name} ({ours[:12]}); make one with hackkv calibrate"
        )


def model_folder(model: ModelConfig) -> ModelFolder:
    """The checkpoint as the first device of `model` takes it. Raises what `find_model` and `places` raise."""
    return find_model(model.path, model.dtype, model.weights, torch.device(places(model)[0]).type)


def plan_worker(model: ModelConfig, codec: CodecConfig) -> Unloaded:
    """Check settings, files and headers, but for those of the weights. Raises `ConfigError` or `CheckpointError`."""
    device = places(model)[0]
    return plan_on(backend_on(model.backend, device), torch.device(device).type, model, codec)


def plan_on(backend: Backend, device: str, model: ModelConfig, codec: CodecConfig) -> Unloaded:
    """`plan_worker` for a backend, and weights as a device of this type takes them."""
    check_dtype(model.dtype, backend.device)
    folder = find_model(model.path, model.dtype, model.weights, device)
    spec = read_spec(folder.path, model.max_context)
    kv_codec = make_codec(with_calibration(codec, folder), spec.kv_shape, backend)
    if kv_codec.origin is not None:
        check_origin(kv_codec.origin, folder)
    return Unloaded(model, folder, spec, kv_codec, backend)
