"""Payloads that lie on a device, as a link of devices receives them: they are checked and used there.

Their checksums are those that the host makes (XXH3-64, seeded with the frame's header), so headers, kept frames and
failover are the same for all wires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
import xxhash
from torch import Tensor

from hackkv.types import KvFrame
from hackkv.wire_form import UNCODED

SHORT: Final = 240
"""XXH3 has other rules for at most this many bytes. The host computes those checksums."""


class DevicePayload:
    """A `Payload` in memory of a device. All of it has arrived."""

    def __init__(
        self,
        buffer: Tensor,
        xxh3_64: Callable[[Sequence[Tensor], int], list[int]],
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`buffer` is uint8 [bytes]. `xxh3_64` gives the checksums of tensors of more than `SHORT` bytes there.
        `stream` makes a context whose work stands on the stream to which the buffer belongs."""
        self._buffer, self._xxh3_64, self._stream = buffer, xxh3_64, stream

    def __len__(self) -> int:
        return self._buffer.numel()

    def __bytes__(self) -> bytes:
        with self._stream():
            return self._buffer.cpu().numpy().tobytes()

    def pieces(self, sizes: Sequence[int], seed: int) -> list[tuple[Tensor, int]]:
        """The payload cut into pieces of these sizes, with the XXH3-64 of each. Pieces are copies, so that each begins
        where tensors begin. They are complete when the call returns."""
        with self._stream():
            copies = [piece.clone() for piece in self._buffer.split(list(sizes))]
            short = [copy for copy in copies if copy.numel() <= SHORT]
            there = iter(self._xxh3_64([copy for copy in copies if copy.numel() > SHORT], seed))
            here = iter(
                (torch.cat(short).cpu() if short else self._buffer[:0].cpu()).split([len(copy) for copy in short])
            )
            return [
                (copy, next(there) if copy.numel() > SHORT else xxhash.xxh3_64_intdigest(next(here).numpy().data, seed))
                for copy in copies
            ]


def lies_on_device(frame: KvFrame) -> bool:
    """Whether a frame's planes can be used where they have arrived. Coded ones are decoded in host memory."""
    return isinstance(frame.payload, DevicePayload) and all(span.method == UNCODED for span in frame.planes)
