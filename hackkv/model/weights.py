"""Weights from safetensors files, checked before use and fused for speed.

Nothing is ever unpickled. Tensors in split form are copied out of the mapped files, so that replacing or truncating a
checkpoint on disk cannot harm a process that serves it. A file in fused form (`layout`) lies in our own cache and is
never changed, so tensors stay where they are mapped: all processes of the machine share one copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hack_kernels.block_weight import WIDTHS, BlockWeight, Weight, as_numbers, fits, packed_shape, quantized
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hackkv.codec import AttentionWeights
from hackkv.errors import CheckpointError
from hackkv.model.config import ModelSpec
from hackkv.model.fused import NAMES, OnBytes
from hackkv.model.layout import FUSED, GATE_UP, PARTS, QKV, QKV_BIAS, Shapes, fused_shapes, split_shapes
from hackkv.model.llama import LayerWeights, Weights
from hackkv.model.packing import Packing

PrepareWeights = Callable[[int, AttentionWeights], AttentionWeights]
"""(layer, weights as in the checkpoint) -> what the codec makes of them: `KvCodec.prepare_weights`."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KNOWN_EXTRAS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that we compute ourselves."""

ITEM_BYTES = {name: dtype.itemsize for dtype, name in NAMES.items()}
"""Bytes per element of the safetensors dtypes that we read."""

PACKED = NAMES[torch.uint8]
"""The dtype of codes, in fused files alone."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Options of loading weights."""

    dtype: torch.dtype
    device: torch.device
    on_bytes: OnBytes
    packing: Packing
    prepare: PrepareWeights | None
    """None for weights as the checkpoint has them."""


def load_weights(folder: Path, spec: ModelSpec, how: Loading) -> Weights:
    """Read and check every tensor of `folder` that `spec` asks for.

    Raises `CheckpointError` that names the file and the tensor.
    """

    with ExitStack() as stack:
        checkpoint = _Checkpoint(folder, spec, stack)
        source = _Source(checkpoint, how)
        embed = source.matrix("", "model.embed_tokens.weight")
        return Weights(
            embed=embed,
            layers=tuple(_layer(spec, index, source, how) for index in range(spec.num_layers)),
            final_norm=source.numbers("model.norm.weight"),
            lm_head=embed if spec.tie_embeddings else source.matrix("", "lm_head.weight"),
        )


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Check files, names, shapes and dtypes as `load_weights` does, without reading a tensor."""
    with ExitStack() as stack:
        _Checkpoint(folder, spec, stack)


@contextmanager
def progress_bar(label: str) -> Iterator[OnBytes]:
    """A bar on standard error while weights load; invisible when that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted; raises `CheckpointError` if there are none or one is missing."""
    if (folder / INDEX).exists():
        names = sorted({str(file) for file in _weight_map(folder / INDEX).values()})
    else:
        names = [SINGLE]
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX}: weight_map: {name!r} is not a file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file")
    return tuple(folder / name for name in names)


def _weight_map(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: weight_map: missing or empty")
    return files


class _Checkpoint:
    """The open files of a checkpoint, with every header checked before the first tensor is read."""

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack) -> None:
        self._sources: dict[str, tuple[Path, Any]] = {}
        self._done = self._total = 0
        self.fused = False
        """Whether the tensors are in fused form."""
        for path in weight_files(folder):
            try:
                source = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error
            for name in source.keys():  # noqa: SIM118  a safetensors handle is not a mapping
                self._sources[name] = (path, source)
            self.fused |= FUSED.items() <= (source.metadata() or {}).items()
        self.shapes: Shapes = fused_shapes(spec) if self.fused else split_shapes(spec)
        tied_copy = {"lm_head.weight"} - self.shapes.keys()
        extras = self._sources.keys() - self.shapes.keys() - tied_copy
        unknown = sorted(name for name in extras if not name.endswith(KNOWN_EXTRAS))
        if unknown:
            path, _ = self._sources[unknown[0]]
            raise CheckpointError(f"{path}: {unknown[0]}: unknown tensor ({len(unknown)} in all); wrong architecture?")
        for name, shape in self.shapes.items():
            self._total += self._check(folder, name, shape)

    def _check(self, folder: Path, name: str, shape: tuple[int, ...]) -> int:
        """Check one header entry; returns the tensor's bytes."""
        if name not in self._sources:
            raise CheckpointError(f"{folder}: {name}: missing tensor")
        path, source = self._sources[name]
        entry = source.get_slice(name)
        found, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if self.fused and dtype == PACKED and fits(shape):
            if found in (packed_shape(shape, bits) for bits in WIDTHS):
                return int(torch.Size(found).numel())
            raise CheckpointError(f"{path}: {name}: shape {list(found)}, which codes of {list(shape)} do not have")
        if found != shape:
            raise CheckpointError(f"{path}: {name}: shape {list(found)}, config.json asks for {list(shape)}")
        if dtype not in ITEM_BYTES or dtype == PACKED:
            raise CheckpointError(
                f"{path}: {name}: dtype {dtype} is not one of {', '.join(ITEM_BYTES.keys() - {PACKED})}"
            )
        return int(torch.Size(shape).numel()) * ITEM_BYTES[dtype]

    def is_packed(self, name: str) -> bool:
        """Whether the tensor is codes."""
        return bool(self._sources[name][1].get_slice(name).get_dtype() == PACKED)

    def read(self, name: str, on_bytes: OnBytes) -> Tensor:
        """One tensor as it is in the file, or a packed matrix's codes. It may share the file's mapping."""
        tensor: Tensor = self._sources[name][1].get_tensor(name)
        self._done += tensor.nbytes
        on_bytes(self._done, self._total)
        return tensor


class _Source:
    """Tensors of a checkpoint in fused form, where they rest or as this process's own."""

    def __init__(self, checkpoint: _Checkpoint, how: Loading) -> None:
        self._checkpoint = checkpoint
        self._how = how

    def numbers(self, name: str) -> Tensor:
        """A tensor that is not packed. It is a view of a fused file if dtype and device are the file's."""
        how, split = self._how, not self._checkpoint.fused
        return self._checkpoint.read(name, how.on_bytes).to(how.device, how.dtype, copy=split)

    def matrix(self, prefix: str, name: str) -> Weight:
        """The matrix `name` of the fused form, packed if the file or the setting says so."""
        how, whole = self._how, prefix + name
        if self._checkpoint.fused and self._checkpoint.is_packed(whole):
            codes = self._checkpoint.read(whole, how.on_bytes).to(how.device)
            return BlockWeight(codes, self._checkpoint.shapes[whole][0])
        found = self.joined(prefix, name)
        bits = how.packing.bits_for(whole, tuple(found.shape), None)
        return found if bits is None else quantized(found, bits)

    def joined(self, prefix: str, name: str) -> Tensor:
        """The tensor `name` of the fused form, not packed."""
        if self._checkpoint.fused or name not in PARTS:
            return self.numbers(prefix + name)
        return torch.cat([self.numbers(prefix + part) for part in PARTS[name]])


def _layer(spec: ModelSpec, index: int, source: _Source, how: Loading) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def read(name: str) -> Tensor:
        return source.numbers(prefix + name)

    qk_norm = None
    if spec.qk_norm:
        heads = (("q", spec.num_heads), ("k", spec.num_kv_heads))
        qk_norm = torch.cat([read(f"self_attn.{name}_norm.weight").repeat(count, 1) for name, count in heads])
    found = LayerWeights(
        input_norm=read("input_layernorm.weight"),
        qkv=source.matrix(prefix, QKV),
        qkv_bias=source.joined(prefix, QKV_BIAS) if spec.qkv_bias else None,
        qk_norm=qk_norm,
        out=source.matrix(prefix, "self_attn.o_proj.weight"),
        ffn_norm=read("post_attention_layernorm.weight"),
        gate_up=source.matrix(prefix, GATE_UP),
        down=source.matrix(prefix, "mlp.down_proj.weight"),
    )
    return found if how.prepare is None else _prepared(index, found, how.prepare, how)


def _prepared(index: int, layer: LayerWeights, prepare: PrepareWeights, how: Loading) -> LayerWeights:
    """`layer` with the weights around attention as a codec prepares them: numbers, or 8 bits where `how` packs."""
    qkv, out = as_numbers(layer.qkv), as_numbers(layer.out)
    packed = isinstance(layer.qkv, BlockWeight) or isinstance(layer.out, BlockWeight)
    around = prepare(index, AttentionWeights(qkv, layer.qkv_bias, layer.qk_norm, out, packed))

    def form(new: Tensor, given: Tensor, was: Weight) -> Weight:
        if new is given:
            return was
        if not isinstance(was, BlockWeight):
            return new
        return quantized(new, 8) if how.packing.packs else new.to(how.dtype)

    return replace(
        layer,
        qkv=form(around.qkv, qkv, layer.qkv),
        qkv_bias=around.qkv_bias,
        qk_norm=around.qk_norm,
        out=form(around.out, out, layer.out),
    )
