"""The real NCCL link over a fake `libnccl.so.2` (`fake_nccl.c`), which is built on first use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from hackkv.device_payload import DevicePayload
from hackkv.types import Payload
from transport.link import LinkKind
from transport.nccl_link import load_bindings, nccl_kind

_STREAMS = count(1)


class Fault(IntEnum):
    """Faults that `fake_fault` can arm for the next call of their kind."""

    INIT_FAILS = 1
    INIT_HANGS = 2
    TRANSFER_HANGS = 3
    TRANSFER_FAILS = 4
    SEND_REFUSED = 5
    TRANSFER_FLIPS = 6


def possible() -> bool:
    """Whether there are bindings and a compiler, and torch has not loaded NVIDIA's library."""
    return bool(find_spec("nccl") and shutil.which("cc") and torch.version.cuda is None)


@cache
def library() -> ctypes.CDLL:
    """Build and load the library. Later loads of libnccl.so.2 in this process get it."""
    with tempfile.TemporaryDirectory() as folder:
        built = built_from(Path(__file__).with_suffix(".c"), Path(folder) / "libnccl.so.2")
        loaded = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    loaded.fake_done.argtypes = [ctypes.c_long]
    return loaded


def built_from(source: Path, library: Path) -> Path:
    """Build a shared library from one C file; return its path."""
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return library


def kind(make_payload: Callable[[Tensor], DevicePayload] | None = None) -> LinkKind:
    """The kind of link. `make_payload` turns an arrived buffer into the payload of a frame."""
    library()
    return nccl_kind(load_bindings(), partial(HostMemory, make_payload or in_memory))


def in_memory(buffer: Tensor) -> DevicePayload:
    """The payload in an arrived buffer."""
    return DevicePayload(buffer, on_host)


def on_host(pieces: Sequence[Tensor], seed: int) -> list[int]:
    """The XXH3-64 of each tensor."""
    return [xxhash.xxh3_64_intdigest(piece.numpy().data, seed) for piece in pieces]


class HostMemory:
    """A `PayloadMemory` that the fake can reach. Each link has a stream of its own."""

    def __init__(self, make_payload: Callable[[Tensor], DevicePayload]) -> None:
        self.stream, self._make_payload = next(_STREAMS), make_payload

    def use(self) -> None:
        """Do nothing: there is no device."""

    def stage(self, payload: Payload) -> Tensor:
        return torch.frombuffer(bytearray(bytes(payload)), dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Callable[[], bool]:
        return lambda: bool(library().fake_done(self.stream))

    def payload(self, buffer: Tensor) -> DevicePayload:
        return self._make_payload(buffer)
