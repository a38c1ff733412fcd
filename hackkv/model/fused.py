"""Writes a safetensors file in fused form (`layout`), row by row, so that no tensor is in memory as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hackkv.model.config import ModelSpec
from hackkv.model.layout import FUSED, fused_parts, fused_shapes

ReadRows = Callable[[str], Iterator[Tensor]]
"""Name of a split tensor -> its rows in order, float32, a block at a time."""

OnBytes = Callable[[int, int], None]
"""Told (bytes of tensors so far, bytes in all)."""

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
"""dtype -> its name in safetensors files."""

ALIGNMENT = 64
"""Bytes: data begins at the start of a cache line."""


def fused_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all tensors of the fused form."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape in fused_shapes(spec).values())


def write_fused(path: Path, spec: ModelSpec, dtype: torch.dtype, read: ReadRows, on_bytes: OnBytes) -> None:
    """Write `path` from the split tensors that `read` gives, rounded to `dtype` once; it is on the disk on return."""
    parts, shapes = fused_parts(spec), fused_shapes(spec)
    header, total = _header(shapes, dtype)
    done = 0
    with path.open("wb") as file:
        file.write(header)
        for name in shapes:
            for part in parts[name]:
                for rows in read(part):
                    data = rows.to(dtype).contiguous().view(torch.uint8).numpy()
                    file.write(data.data)
                    done += data.nbytes
                    on_bytes(done, total)
        file.flush()
        os.fsync(file.fileno())
    if done != total:
        raise AssertionError(f"{path}: wrote {done} bytes of tensors, promised {total}")


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, int]:
    """The header of a safetensors file, and the bytes of the tensors that follow it."""
    entries: dict[str, object] = {"__metadata__": FUSED}
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, start
