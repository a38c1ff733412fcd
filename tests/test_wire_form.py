"""Every wire form of `WIRE_FORMS` decodes what it coded, and survives any other input."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hack_kernels import load
from hypothesis import given, settings
from hypothesis import strategies as st

from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError, FrameRefused
from hackkv.types import KvShape
from hackkv.wire_form import UNCODED, Bytes, WireForm, wire_form
from tests.handoffs import FORMS, codec_of, ship

every_form = pytest.mark.parametrize("form", [wire_form(name) for name in FORMS], ids=FORMS)
zstd = pytest.mark.skipif("zstd" not in FORMS, reason="the package zstandard is not installed")


def plane_of(seed: int, size: int, alphabet: int) -> Bytes:
    """Random bytes of `alphabet` values: they shrink if it is small."""
    return np.random.default_rng(seed).integers(0, alphabet, size, dtype=np.uint8)


planes = st.builds(plane_of, st.integers(0, 2**32), st.integers(1, 6000), st.sampled_from([1, 2, 16, 256]))
itemsizes = st.sampled_from([1, 2, 4, 8])


def of_items(plane: Bytes, itemsize: int) -> Bytes:
    """The plane, repeated up to a whole number of elements."""
    return np.resize(plane, -(-plane.size // itemsize) * itemsize)


@every_form
@settings(max_examples=100)
@given(plane=planes, itemsize=itemsizes)
def test_what_is_coded_comes_back_and_never_grows(form: WireForm, plane: Bytes, itemsize: int) -> None:
    plane = of_items(plane, itemsize)
    coded = form.encode(plane, itemsize)
    if coded is None:
        return
    assert len(coded) <= form.cap(plane.size) <= plane.size
    found = np.empty_like(plane)
    form.decode(memoryview(coded), found, itemsize)
    assert np.array_equal(found, plane)
    assert form.encode(plane, itemsize) == coded, "the same bytes for the same plane"


shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@every_form
@settings(max_examples=100)
@given(shape=shapes, itemsize=itemsizes, seed=st.integers(0, 2**32), alphabet=st.sampled_from([1, 2, 16, 256]))
def test_planes_of_every_shape_come_back(
    form: WireForm, shape: list[int], itemsize: int, seed: int, alphabet: int
) -> None:
    """The values of a channel lie near one another, and channels differ."""
    centres = np.random.default_rng(seed).integers(0, 256, shape[-1] * itemsize, dtype=np.uint8)
    plane = plane_of(seed, prod(shape) * itemsize, alphabet)
    plane += np.resize(centres, plane.size)
    coded = form.encode(plane, itemsize, shape)
    if coded is None:
        return
    found = np.empty_like(plane)
    form.decode(memoryview(coded), found, itemsize)
    assert np.array_equal(found, plane)


@every_form
def test_codes_shrink_if_the_form_codes_at_all(form: WireForm) -> None:
    plane = plane_of(1, 4096, 4)
    coded = form.encode(plane, 1)
    assert (coded is None) == (form.method == UNCODED)
    assert coded is None or len(coded) < plane.size // 3
    assert form.encode(plane_of(1, 4096, 256), 1) is None


@every_form
@settings(max_examples=200)
@given(plane=planes, itemsize=itemsizes, data=st.data())
def test_damage_is_an_error_or_harmless(form: WireForm, plane: Bytes, itemsize: int, data: st.DataObject) -> None:
    """Code that is cut, lengthened, flipped or arbitrary gives `ValueError` or a plane of the due size."""
    plane = of_items(plane, itemsize)
    coded = form.encode(plane, itemsize) or plane.tobytes()
    how = data.draw(st.sampled_from(["cut", "longer", "flip", "anything"]))
    if how == "cut":
        damaged = coded[: data.draw(st.integers(0, len(coded) - 1))]
    elif how == "longer":
        damaged = coded + data.draw(st.binary(min_size=1, max_size=40))
    elif how == "flip":
        at = data.draw(st.integers(0, len(coded) - 1))
        damaged = coded[:at] + bytes([coded[at] ^ 1 << data.draw(st.integers(0, 7))]) + coded[at + 1 :]
    else:
        damaged = data.draw(st.binary(max_size=200))
    found = np.empty_like(plane)
    try:
        form.decode(memoryview(damaged), found, itemsize)
    except ValueError:
        return
    assert found.size == plane.size
    assert len(damaged) == len(coded) or how == "anything", "a wrong length is always found"


@every_form
def test_another_size_is_refused(form: WireForm) -> None:
    """The plane has more bytes than its header said, or fewer."""
    plane = plane_of(2, 4096, 4)
    coded = memoryview(form.encode(plane, 1) or plane.tobytes())
    for size in (1, 4095, 4097, 1 << 20):
        with pytest.raises(ValueError, match=r"where|for|due|cannot hold"):
            form.decode(coded, np.empty(size, dtype=np.uint8), 1)


def test_forms_have_names_and_numbers_of_their_own() -> None:
    forms = [wire_form(name) for name in FORMS]
    assert [form.name for form in forms] == FORMS
    assert len({form.method for form in forms}) == len(forms)
    assert all(0 <= form.method < 256 for form in forms)


def test_an_unknown_form_is_named() -> None:
    config = CodecConfig(name="fp16", settings={"wire_form": "lz9"})
    with pytest.raises(
        ConfigError, match=r"codec\.settings\.wire_form: wire form 'lz9' is unknown here; known: raw, zstd, rans"
    ):
        make_codec(config, KvShape(1, 1, 64), load("reference"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["fp16", "hack"])
def test_every_codec_takes_the_setting(codec: str, form: str) -> None:
    made = make_codec(CodecConfig(name=codec, settings={"wire_form": form}), KvShape(1, 1, 64), load("reference"))
    assert (made.name, made.wire_form.name) == (codec, form)
    assert codec_of(codec).wire_form.name == "raw"


HOSTILE_BYTES = 1024


class Hostile:
    """Sends fixed bytes under the name of another form, for planes of `HOSTILE_BYTES`."""

    def __init__(self, form: WireForm, coded: bytes) -> None:
        self.name, self.method, self._form, self._coded = form.name, form.method, form, coded

    def cap(self, raw_bytes: int) -> int:
        return self._form.cap(raw_bytes)

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        return self._coded if plane.size == HOSTILE_BYTES else None

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        self._form.decode(coded, plane, itemsize)


def bombs() -> dict[str, tuple[bytes, str]]:
    """Zstandard frames that our senders never make, and the words of the error that refuses each."""
    zstandard = pytest.importorskip("zstandard")

    def frame(content: bytes, **options: bool) -> Any:
        return zstandard.ZstdCompressor(level=1, **options).compress(content)

    stream = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    huge = zstandard.ZstdCompressionParameters(window_log=27, write_checksum=True, write_content_size=False)
    endless = zstandard.ZstdCompressor(compression_params=huge).compressobj()
    return {
        "nothing": (b"", "zstd: "),
        "no frame": (b"codes", "zstd: "),
        "16 MiB of zeros": (frame(bytes(1 << 24), write_checksum=True), "a zstd frame of 16777216 bytes where"),
        "no size": (stream.compress(b"x") + stream.flush(), "a zstd frame of"),
        "a window of 128 MiB": (endless.compress(b"x") + endless.flush(), "a zstd frame of"),
        "no checksum": (frame(bytes(1024), write_checksum=False), "not of our making"),
        "two frames": (frame(bytes(1024), write_checksum=True) * 2, "unused data"),
        "a skippable frame": (b"\x50\x2a\x4d\x18\x00\x04\x00\x00" + bytes(100), "not of our making"),
    }


@zstd
@pytest.mark.parametrize(
    "bomb",
    [
        "nothing",
        "no frame",
        "16 MiB of zeros",
        "no size",
        "a window of 128 MiB",
        "no checksum",
        "two frames",
        "a skippable frame",
    ],
)
def test_hostile_frames_with_honest_checksums_are_refused(bomb: str) -> None:
    """A peer with a valid token sends planes of 1024 bytes whose code is hostile."""
    form, (coded, words) = wire_form("zstd"), bombs()[bomb]
    shipment = ship("hack", layers=1, heads=1, tokens=64, form=Hostile(form, coded))
    frame = shipment.frames[0]
    assert frame.planes[0].raw_bytes == HOSTILE_BYTES
    with pytest.raises(FrameRefused, match=f"plane {frame.planes[0].name}.* {words}") as caught:
        shipment.ledger().accept(frame)
    assert caught.value.reason in ("undecodable", "oversized")
