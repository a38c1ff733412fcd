"""The header of a GGUF file: metadata, and where each tensor lies.

The `gguf` package knows types and blocks, and computes with them (`tensors`). Its reader is for trusted files: an array
that claims 2^60 numbers keeps it busy until memory is full. So the header is read here. A length is compared with what
is left of the file, and with a cap, before anything of that length is allocated. Nothing is mapped: a file that shrinks
while it is read gives an error, not a signal.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hackkv.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16

MAX_ENTRIES = 1 << 16
"""The most metadata entries, and the most tensors."""
MAX_NAME = 1 << 10
"""The longest key or tensor name, in bytes."""
MAX_STRING = 1 << 22
"""The longest value, in bytes. Chat templates are the longest and have some 10 KiB."""
MAX_ITEMS = 1 << 22
"""The longest array. The largest vocabularies have 2^18 tokens, and merges a few times that."""
MAX_HEADER = 1 << 26
"""The longest header, in bytes."""
MAX_DIMS = 4

_Kind = GGMLQuantizationType
TYPES = (
    _Kind.F32,
    _Kind.F16,
    _Kind.BF16,
    _Kind.Q8_0,
    _Kind.Q4_0,
    _Kind.Q4_1,
    _Kind.Q5_0,
    _Kind.Q5_1,
    _Kind.Q4_K,
    _Kind.Q5_K,
    _Kind.Q6_K,
)
"""The types of tensors that we read. Q5_0 and Q5_1 stand in for Q4_K and Q5_K where rows are no multiple of 256."""

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file has it the other way round."""
    offset: int
    """First byte, from the beginning of the file."""
    size: int
    """Bytes of the tensor."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last dimension."""
        return self.size // max(1, math.prod(self.shape[:-1]))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file, checked against the file's size."""

    path: Path
    metadata: dict[str, Any]
    """Numbers, strings, flags, and lists of them."""
    tensors: dict[str, TensorEntry]

    def fail(self, name: str, complaint: str) -> CheckpointError:
        """The error to raise about the metadata field or tensor `name`."""
        return CheckpointError(f"{self.path}: {name}: {complaint}")


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the file at `path`.

    Raises `CheckpointError` that names the file, and the field or tensor at fault: no GGUF file, truncated, a size
    beyond its cap, a type that we do not read, a tensor that reaches beyond the end.
    """
    try:
        with _Cursor(path) as cursor:
            return _read(cursor)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _read(cursor: _Cursor) -> GgufHeader:
    if cursor.left < len(MAGIC) or cursor.take(len(MAGIC), "magic") != MAGIC:
        raise cursor.fail("not a GGUF file")
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        raise cursor.fail(f"GGUF version {version} is not one of {', '.join(map(str, VERSIONS))}")
    num_tensors = cursor.count("tensor count", MAX_ENTRIES)
    num_fields = cursor.count("metadata count", MAX_ENTRIES)
    metadata = dict[str, Any]()
    for index in range(num_fields):
        key = cursor.string(f"name of metadata field {index}", MAX_NAME)
        if key in metadata:
            raise cursor.fail(f"{key}: the field comes twice")
        metadata[key] = _value(cursor, key)
    found = [_tensor(cursor, index) for index in range(num_tensors)]
    start = _align(cursor.done, _alignment(cursor, metadata))
    tensors = dict[str, TensorEntry]()
    for name, kind, shape, offset in found:
        if name in tensors:
            raise cursor.fail(f"{name}: the tensor comes twice")
        tensors[name] = _placed(cursor, TensorEntry(name, kind, shape, start + offset, 0))
    return GgufHeader(cursor.path, metadata, tensors)


def _value(cursor: _Cursor, key: str) -> Any:
    kind = _value_type(cursor, key)
    if kind is GGUFValueType.STRING:
        return cursor.string(key, MAX_STRING)
    if kind is not GGUFValueType.ARRAY:
        return cursor.number(_SCALARS[kind], key)
    item = _value_type(cursor, key)
    length = cursor.count(key, MAX_ITEMS)
    if item is GGUFValueType.ARRAY:
        raise cursor.fail(f"{key}: arrays of arrays are not supported")
    if item is GGUFValueType.STRING:
        return [cursor.string(key, MAX_STRING) for _ in range(length)]
    layout = struct.Struct(f"<{length}{_SCALARS[item]}")
    return list(layout.unpack(cursor.take(layout.size, key)))


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.number("I", key)
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.fail(f"{key}: there is no value type {number}") from error


def _tensor(cursor: _Cursor, index: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string(f"name of tensor {index}", MAX_NAME)
    dims = cursor.number("I", name)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{name}: {dims} dimensions, expected 1 to {MAX_DIMS}")
    shape = tuple(cursor.number("Q", name) for _ in range(dims))[::-1]
    number = cursor.number("I", name)
    names = ", ".join(kind.name for kind in TYPES)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.fail(f"{name}: there is no type {number}; known: {names}") from error
    if kind not in TYPES:
        raise cursor.fail(f"{name}: type {kind.name} is not one of {names}")
    return name, kind, shape, cursor.number("Q", name)


def _placed(cursor: _Cursor, entry: TensorEntry) -> TensorEntry:
    """`entry` with its size, which lies inside the file."""
    block, block_bytes = GGML_QUANT_SIZES[entry.kind]
    if not all(entry.shape):
        raise cursor.fail(f"{entry.name}: shape {list(entry.shape)} is empty")
    if entry.shape[-1] % block:
        raise cursor.fail(f"{entry.name}: rows of {entry.shape[-1]} are no multiple of {entry.kind.name}'s {block}")
    size = math.prod(entry.shape) // block * block_bytes
    if entry.offset + size > cursor.size:
        raise cursor.fail(
            f"{entry.name}: truncated: {entry.kind.name} {list(entry.shape)} ends at byte {entry.offset + size}, "
            f"the file at {cursor.size}"
        )
    return TensorEntry(entry.name, entry.kind, entry.shape, entry.offset, size)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment: expected a power of two up to {MAX_ALIGNMENT}, found {value!r}")
    return value


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Cursor:
    """Reads a file from its beginning. Every complaint names the file; a length is checked before it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self.done = 0

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return self.size - self.done

    def fail(self, complaint: str) -> CheckpointError:
        """The error to raise about this file."""
        return CheckpointError(f"{self.path}: {complaint}")

    def take(self, size: int, what: str) -> bytes:
        """The next `size` bytes. `what` names them in a complaint."""
        if size > self.left:
            raise self.fail(f"{what}: truncated: {size} bytes expected at byte {self.done}, {self.left} are left")
        if self.done + size > MAX_HEADER:
            raise self.fail(f"{what}: the header is longer than {MAX_HEADER} bytes")
        data = self._file.read(size)
        if len(data) != size:
            raise self.fail(f"{what}: the file became shorter while it was read")
        self.done += size
        return data

    def number(self, letter: str, what: str) -> Any:
        """One little-endian value of the `struct` format `letter`."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def count(self, what: str, most: int) -> int:
        """A count of items, at most `most`."""
        value: int = self.number("Q", what)
        if value > most:
            raise self.fail(f"{what}: {value} items are more than the {most} that we read")
        return value

    def string(self, what: str, most: int) -> str:
        """UTF-8 text of at most `most` bytes. Bytes that are not UTF-8 show as U+FFFD, as in some vocabularies."""
        size: int = self.number("Q", what)
        if size > most:
            raise self.fail(f"{what}: {size} bytes of text are more than the {most} that we read")
        return self.take(size, what).decode("utf-8", errors="replace")
