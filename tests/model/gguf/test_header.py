"""Wrong headers: every defect is an error that names the file and the field, before memory is allocated."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hackkv.errors import CheckpointError
from hackkv.model import find_model
from hackkv.model.gguf.header import TYPES, read_header
from hackkv.model.tiny import Tiny
from tests.model.gguf.writing import KINDS, write_gguf

HUGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value(key: str, kind: GGUFValueType, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def array(key: str, kind: int, length: int, data: bytes = b"") -> bytes:
    return value(key, GGUFValueType.ARRAY, struct.pack("<IQ", kind, length) + data)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(*fields: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(fields))
    return b"GGUF" + counts + b"".join((*fields, *tensors))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (file(version=1), "GGUF version 1 is not one of 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensor count: .* more than the 65536 that we read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata count: .* more than the 65536 that we read"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "metadata count: truncated: 8 bytes expected at byte 16, 0 are left"),
        (file(array("a.b", GGUFValueType.INT8, HUGE)), "a.b: .* items are more than"),
        (file(array("a.b", GGUFValueType.INT8, 1 << 20)), "a.b: truncated: 1048576 bytes expected"),
        (file(array("a.b", GGUFValueType.ARRAY, 1)), "a.b: arrays of arrays"),
        (file(array("a.b", 77, 1)), "a.b: there is no value type 77"),
        (file(value("a.b", GGUFValueType.STRING, struct.pack("<Q", HUGE))), "a.b: .* bytes of text are more than"),
        (file(struct.pack("<Q", HUGE)), "name of metadata field 0: .* bytes of text are more than"),
        (file(*[value("a.b", GGUFValueType.BOOL, b"\1")] * 2), "a.b: the field comes twice"),
        (file(value("general.alignment", GGUFValueType.UINT32, struct.pack("<I", 3))), "general.alignment: expected"),
        (file(tensors=(tensor("w", (1, 1, 1, 1, 1), 0),)), "w: 5 dimensions"),
        (file(tensors=(tensor("w", (32,), 99),)), "w: there is no type 99; known: F32, F16"),
        (file(tensors=(tensor("w", (256,), KINDS.IQ4_XS),)), "w: type IQ4_XS is not one of F32, F16, BF16, Q8_0"),
        (file(tensors=(tensor("w", (33,), KINDS.Q4_0),)), "w: rows of 33 are no multiple of Q4_0's 32"),
        (file(tensors=(tensor("w", (0,), 0),)), "w: shape .* is empty"),
        (file(tensors=(tensor("w", (HUGE, HUGE), 0),)), "w: truncated: F32 .* ends at byte"),
        (file(tensors=(tensor("w", (1,), 0, HUGE),)), "w: truncated: F32 .* ends at byte"),
    ],
)
def test_a_lie_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: {named}"):
        read_header(path)


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file(tensors=(tensor("w", (1,), 0),) * 2) + bytes(64))
    with pytest.raises(CheckpointError, match="w: the tensor comes twice"):
        read_header(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: No such file"):
        read_header(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named_wherever_it_ends(share: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", Tiny(layers=1))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*truncated"):
        find_model(str(path))


@pytest.fixture(scope="module", name="sound")
def write_sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tiny = Tiny(layers=1, hidden=64, heads=1, kv_heads=1, ffn=64)
    return write_gguf(tmp_path_factory.mktemp("sound") / "model.gguf", tiny).read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused(data: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    """Any changed bytes give `CheckpointError` or a header, never another exception."""
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 12_000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        tensors = read_header(path).tensors
    except CheckpointError:
        tensors = {}
    assert all(entry.offset + entry.size <= len(content) for entry in tensors.values())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_the_header_of_a_sound_file(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    tiny = Tiny(layers=1, hidden=256, ffn=512)
    header = read_header(write_gguf(tmp_path / "model.gguf", tiny, kind))
    entry = header.tensors["blk.0.ffn_down.weight"]
    assert (entry.kind, entry.shape) == (kind, (256, 512))
    assert header.metadata["general.architecture"] == "llama"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 512
