"""Numbers of the host on their way to a device: many lists in one buffer, so that a step copies once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

STRIDE: Final = 32
"""Lists begin, and rows of tables follow each other, at multiples of this many numbers: 256 bytes, as memory that CUDA
gives. So pointers and strides of every batch are divisible alike, and a kernel is compiled once for all of them."""

Numbers = Sequence[int] | npt.NDArray[np.int64]


def on_device(lists: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Each list as an int64 tensor [its length] on `device`; in one copy, but for the processor, which needs none."""
    if device.type == "cpu":
        return [torch.from_numpy(np.array(each, dtype=np.int64)) for each in lists]
    buffer, places = packed(lists)
    there = to_device(torch.from_numpy(buffer), device)
    return [there[place] for place in places]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory on `device`. A GPU copies it in its turn, and the host goes on. From memory that is not
    pinned the host would wait."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def packed(lists: Sequence[Numbers]) -> tuple[npt.NDArray[np.int64], list[slice]]:
    """All lists in one buffer, and where each of them lies."""
    places, end = list[slice](), 0
    for each in lists:
        stop = end + len(each)
        places.append(slice(end, stop))
        end = -(-stop // STRIDE) * STRIDE
    buffer = np.zeros(end, dtype=np.int64)
    for place, each in zip(places, lists, strict=True):
        buffer[place] = each
    return buffer, places


def table_of(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Lists of different lengths as rows of a table, zeros past their ends; flat, a whole number of `STRIDE`s a row.

    A row has at least one `STRIDE`, even if all lists are empty. Rows without one would have stride 1, and a kernel
    would be compiled for that.
    """
    table = np.zeros((len(rows), max(1, -(-max(map(len, rows)) // STRIDE)) * STRIDE), dtype=np.int64)
    for row, each in zip(table, rows, strict=True):
        row[: len(each)] = each
    return table.reshape(-1)
