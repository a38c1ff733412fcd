"""Writes a safetensors file in fused form (`layout`), row by row, so that no tensor is in memory as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from hack_kernels.block_weight import TILE, Codes, pack, packed_shape
from torch import Tensor

from hackkv.model.config import ModelSpec
from hackkv.model.layout import FUSED, fused_parts, fused_shapes

ReadRows = Callable[[str], Iterator[Tensor]]
"""Name of a split tensor -> its rows in order, float32, a block at a time."""

ReadCodes = Callable[[str, int], Iterator[Codes]]
"""(name of a split tensor, bits) -> codes of its rows in order, a block at a time."""

OnBytes = Callable[[int, int], None]
"""Told (bytes of tensors so far, bytes in all)."""

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
"""dtype -> its name in safetensors files."""

ALIGNMENT = 64
"""Bytes: data begins at the start of a cache line."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors of a fused file that are codes."""

    bits: Mapping[str, int]
    """Name of a tensor -> bits of its codes."""
    read: ReadCodes


def _no_codes(name: str, bits: int) -> Iterator[Codes]:
    raise AssertionError(f"{name} is not packed")


NONE_PACKED = Packed({}, _no_codes)


def fused_bytes(spec: ModelSpec, dtype: torch.dtype, bits: Mapping[str, int] = NONE_PACKED.bits) -> int:
    """Bytes of all tensors of the fused form, of which those in `bits` are packed."""
    placed = _placed(fused_shapes(spec), dtype, bits).values()
    return sum(torch.Size(shape).numel() * kind.itemsize for kind, shape in placed)


def write_fused(
    path: Path, spec: ModelSpec, dtype: torch.dtype, read: ReadRows, on_bytes: OnBytes, packed: Packed = NONE_PACKED
) -> None:
    """Write `path` from the split tensors that `read` gives, rounded to `dtype` once, or as the codes of `packed`; it
    is on the disk on return."""
    parts, placed = fused_parts(spec), _placed(fused_shapes(spec), dtype, packed.bits)
    header, total = _header(placed)
    done = 0
    with path.open("wb") as file:
        file.write(header)
        for name in placed:
            bits = packed.bits.get(name)
            blocks: Iterator[Tensor]
            if bits is None:
                blocks = (rows.to(dtype).contiguous() for part in parts[name] for rows in read(part))
            else:
                blocks = _in_tiles(chain.from_iterable(packed.read(part, bits) for part in parts[name]))
            for block in blocks:
                data = block.view(torch.uint8).numpy()
                file.write(data.data)
                done += data.nbytes
                on_bytes(done, total)
        file.flush()
        os.fsync(file.fileno())
    if done != total:
        raise AssertionError(f"{path}: wrote {done} bytes of tensors, promised {total}")


def _in_tiles(blocks: Iterable[Codes]) -> Iterator[Tensor]:
    """The data of a packed matrix, whose rows come in blocks of any number."""
    left: Codes | None = None
    for more in blocks:
        joined = more if left is None else _joined(left, more)
        whole = len(joined[0]) // TILE * TILE
        if whole:
            yield pack(*_rows(joined, slice(whole))).data
        left = _rows(joined, slice(whole, None))
    if left is not None and len(left[0]):
        yield pack(*left).data


def _rows(codes: Codes, rows: slice) -> Codes:
    return codes[0][rows], codes[1][rows], None if codes[2] is None else codes[2][rows]


def _joined(first: Codes, second: Codes) -> Codes:
    minima = None if first[2] is None or second[2] is None else torch.cat((first[2], second[2]))
    return torch.cat((first[0], second[0])), torch.cat((first[1], second[1])), minima


def _placed(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, bits: Mapping[str, int]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every tensor of the file, with the dtype and shape that it has there."""
    return {
        name: (torch.uint8, packed_shape(shape, bits[name])) if name in bits else (dtype, shape)
        for name, shape in shapes.items()
    }


def _header(placed: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """The header of a safetensors file, and the bytes of the tensors that follow it."""
    entries: dict[str, object] = {"__metadata__": FUSED}
    start = 0
    for name, (dtype, shape) in placed.items():
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, start
