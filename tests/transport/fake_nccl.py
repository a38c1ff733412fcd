"""The NCCL link as it is, over a `libnccl.so.2` of our own (`fake_nccl.c`), which is built on first use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from hackkv.types import Payload
from transport.link import LinkKind
from transport.nccl_link import load_bindings, nccl_kind

_STREAMS = count(1)


class Fault(IntEnum):
    """What `fake_fault` makes of the next call of its kind."""

    INIT_FAILS = 1
    INIT_HANGS = 2
    TRANSFER_HANGS = 3
    TRANSFER_FAILS = 4
    SEND_REFUSED = 5


def possible() -> bool:
    """Whether bindings and a compiler are here, and torch has not loaded NVIDIA's library."""
    return bool(find_spec("nccl") and shutil.which("cc") and torch.version.cuda is None)


@cache
def library() -> ctypes.CDLL:
    """The library, loaded: whoever asks for libnccl.so.2 after this gets it."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "libnccl.so.2"
        source = Path(__file__).with_suffix(".c")
        flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{built.name}"]
        subprocess.run(["cc", *flags, "-o", built, source], check=True)
        loaded = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    loaded.fake_done.argtypes = [ctypes.c_long]
    return loaded


def kind() -> LinkKind:
    """The kind of link."""
    library()
    return nccl_kind(load_bindings(), HostMemory)


class HostMemory:
    """A `Memory` that the fake can reach. Each link has a stream of its own."""

    def __init__(self) -> None:
        self.stream = next(_STREAMS)

    def use(self) -> None:
        """There is no device."""

    def stage(self, payload: Payload) -> Tensor:
        return torch.frombuffer(bytearray(bytes(payload)), dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Callable[[], bool]:
        return lambda: bool(library().fake_done(self.stream))

    def payload(self, buffer: Tensor) -> Payload:
        return buffer.numpy().tobytes()
