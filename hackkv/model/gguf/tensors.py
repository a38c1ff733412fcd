"""Tensors of a GGUF file under Hugging Face's names, as float32 rows or as codes.

llama.cpp rotates neighbouring channels, Hugging Face channels half a head apart. So llama.cpp's converter interleaves
the rows of Q and K of each head for the architectures that it calls `llama`; here they go back into their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from types import TracebackType

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from hack_kernels.block_weight import Codes, nearest_codes
from torch import Tensor

from hackkv.model.config import ModelSpec
from hackkv.model.gguf.header import GgufHeader, TensorEntry
from hackkv.model.gguf.packed import HELD, codes_of
from hackkv.model.layout import split_shapes

BLOCK_VALUES = 1 << 22
"""Values that are turned into numbers at a time: 16 MiB of float32, and about as much again for the conversion."""

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Module of a layer -> the middle of its name in a GGUF file."""

EXTRAS = ("rope_freqs.weight",)
"""Tensors that go into the configuration, not the weights."""

PERMUTED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class GgufTensors:
    """The open file, with names and shapes checked against the model's."""

    def __init__(self, header: GgufHeader, spec: ModelSpec, permuted: bool) -> None:
        """Raises `CheckpointError` that names the file and the tensor: missing, unknown, or of another shape."""
        self._header = header
        self._permuted_rows = spec.head_dim if permuted else 0
        self._entries = {name: _entry(header, name, shape) for name, shape in split_shapes(spec).items()}
        known = {entry.name for entry in self._entries.values()} | set(EXTRAS)
        if unknown := sorted(header.tensors.keys() - known):
            raise header.fail(unknown[0], f"unknown tensor ({len(unknown)} in all); wrong architecture?")
        self._file: BufferedReader = header.path.open("rb")

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def rows(self, name: str) -> Iterator[Tensor]:
        """float32 rows of the tensor with Hugging Face's `name`, in order: blocks [rows, in], or all of a vector.

        Raises `CheckpointError` that names the file and the tensor if the file became shorter.
        """
        entry = self._entries[name]
        if len(entry.shape) == 1:
            yield _numbers(self._raw(entry, 0, 1), entry.kind).reshape(-1)
            return
        for rows in self._blocks(name):
            yield _numbers(rows, entry.kind)

    def held(self, name: str) -> int | None:
        """Bits of the codes that the file has for this tensor; None if it has none that we take."""
        return HELD.get(self._entries[name].kind)

    def codes(self, name: str, bits: int) -> Iterator[Codes]:
        """Codes of the tensor's rows, in blocks: those of the file if they have `bits` bits, else the nearest."""
        kind = self._entries[name].kind
        for rows in self._blocks(name):
            yield codes_of(rows, kind) if HELD.get(kind) == bits else nearest_codes(_numbers(rows, kind), bits)

    def _raw(self, entry: TensorEntry, start: int, count: int) -> Tensor:
        return raw_rows(self._header, self._file, entry, start, count)

    def _blocks(self, name: str) -> Iterator[Tensor]:
        """uint8 [rows, bytes] of a matrix."""
        entry = self._entries[name]
        group = self._permuted_rows if name.endswith(PERMUTED) else 0
        step = max(1, BLOCK_VALUES // entry.shape[-1])
        if group:
            step = max(group, step // group * group)
        for start in range(0, entry.shape[0], step):
            rows = self._raw(entry, start, min(step, entry.shape[0] - start))
            yield _in_halves(rows, group) if group else rows


def raw_rows(header: GgufHeader, file: BufferedReader, entry: TensorEntry, start: int, count: int) -> Tensor:
    """uint8 [count, bytes]: rows of one tensor, its last dimension being a row."""
    data = bytearray(count * entry.row_bytes)
    file.seek(entry.offset + start * entry.row_bytes)
    if file.readinto(data) != len(data):
        raise header.fail(entry.name, "truncated: the file became shorter while it was read")
    return torch.frombuffer(data, dtype=torch.uint8).view(count, entry.row_bytes)


def _numbers(rows: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """float32 [rows, in] of uint8 [rows, bytes]."""
    return torch.from_numpy(np.array(dequantize(rows.numpy(), kind), dtype=np.float32))


def read_vector(header: GgufHeader, name: str) -> Tensor | None:
    """float32 [n]: the vector `name` of the file, None if there is none. Raises `CheckpointError` for a matrix."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if len(entry.shape) != 1:
        raise header.fail(name, f"expected a vector, found shape {list(entry.shape)}")
    with header.path.open("rb") as file:
        return _numbers(raw_rows(header, file, entry, 0, 1), entry.kind).reshape(-1)


def gguf_name(name: str) -> str:
    """The name in a GGUF file of the tensor that Hugging Face calls `name`."""
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, ending = rest.rsplit(".", 1)
    return f"blk.{layer}.{LEAVES[module]}.{ending}"


def _entry(header: GgufHeader, name: str, shape: tuple[int, ...]) -> TensorEntry:
    there = gguf_name(name)
    entry = header.tensors.get(there)
    if entry is None:
        raise header.fail(there, "missing tensor")
    if entry.shape != shape:
        found = f"{entry.kind.name} {list(entry.shape)}"
        raise header.fail(there, f"shape {found}, the metadata asks for {list(shape)}")
    return entry


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * D, in] whose channel pairs are neighbours -> pairs are half a head apart."""
    heads = rows.shape[0] // head_dim
    return rows.reshape(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
