"""Recorded steps: calls of the compiled kernels, made again with no Python between them.

Only calls of the kernels are recorded. If torch computes something in a step, other than views and empty tensors, the
step is not recorded: it runs anew each time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hack_kernels.cpu.extension import compiled

_EMPTY: Final = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
_LINE: Final = 64
"""Bytes of a cache line, the least that a tensor takes."""


class CpuRecorder:
    """Implements `Recorder`. All its recorded steps share one memory."""

    queues = False

    def __init__(self) -> None:
        self._room = _Room()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`. If torch computes in `work`, the result is `work` itself, and a first run was in vain."""
        try:
            with _KernelsOnly(self._room):
                program: Callable[[], None] = compiled().record(work)
        except _TorchComputes:
            return work
        return program


class _TorchComputes(Exception):
    """An operator's result has values that no kernel computed."""


class _KernelsOnly(TorchDispatchMode):
    """Refuses operators that compute. Empty tensors come from `room`: a program uses their memory again."""

    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty = room.empty

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nobody compiles recorded steps. With True torch would import its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _EMPTY:
            return self._empty(func(*args, **{**(kwargs or {}), "device": "meta"}))
        if not func.is_view:
            raise _TorchComputes(str(func))
        return func(*args, **(kwargs or {}))


class _Room:
    """Memory for tensors, in pieces of 2^n bytes. The system never gets it back: a recorded program may run again."""

    def __init__(self) -> None:
        self._free = defaultdict[int, list[Tensor]](list)
        """Size in bytes -> memory that no tensor uses."""

    def empty(self, like: Tensor) -> Tensor:
        """A tensor with the shape, strides and dtype of `like`. Its memory is free again when its storage is gone."""
        size = max(_LINE, 1 << (like.untyped_storage().nbytes() - 1).bit_length())
        free = self._free[size]
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8)
        held = memory.numpy().data
        weakref.finalize(held, free.append, memory).atexit = False
        return torch.frombuffer(held, dtype=like.dtype, count=max(1, size // like.itemsize)).as_strided(
            like.shape, like.stride()
        )
