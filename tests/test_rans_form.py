"""Wire form `rans`: channels that differ take what their entropy says, and hostile code is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.wire_form import Bytes, wire_form
from tests.handoffs import FORMS

pytestmark = pytest.mark.skipif("rans" not in FORMS, reason="the C++ kernels are not built")

SHAPE = (2, 4, 32, 16)
"""[heads, pages, bytes of a channel in a page, channels]"""
TABLE = 10
"""Where the first table begins: behind size, alphabet, number of tables, blocks and row."""


def nibbles(seed: int, spread: int) -> Bytes:
    """Codes of 4 bits in `SHAPE`, around a centre of their own for each channel."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 16 - spread, (SHAPE[0], 1, 1, SHAPE[-1]))
    low, high = (centres + rng.integers(0, spread, SHAPE) for _ in range(2))
    return (low | high << 4).astype(np.uint8).reshape(-1)


def coded(plane: Bytes) -> bytes:
    made = wire_form("rans").encode(plane, 1, SHAPE)
    assert made is not None
    return made


def refused(code: bytes, plane: Bytes) -> str:
    """The words with which decoding refuses."""
    with pytest.raises(ValueError, match="rans: ") as caught:
        wire_form("rans").decode(memoryview(code), np.empty_like(plane), 1)
    return str(caught.value)


def test_channels_that_differ_have_tables_of_their_own() -> None:
    """A channel of two values takes one bit of a code, a fourth of the plane, beside tables. One table takes more."""
    plane = nibbles(1, 2)
    made, flat = coded(plane), wire_form("rans").encode(plane, 1)
    assert flat is not None
    assert plane.size / 4 < len(made) < 0.32 * plane.size < len(flat)


def test_channels_may_change_after_some_pages() -> None:
    """Each of 3 parts of 8 pages has other centres; 2 bits of 8 are left for a byte's two codes, beside tables."""
    parts = [nibbles(seed, 2).reshape(SHAPE).repeat(2, 1) for seed in range(3)]
    plane = np.concatenate(parts, 1)
    made = wire_form("rans").encode(plane.reshape(-1), 1, plane.shape)
    assert made is not None
    assert len(made) < 0.3 * plane.size


def test_a_constant_channel_beside_noise_takes_next_to_nothing() -> None:
    """Half of the plane is noise. The constant channel's table has none of the noise's symbols."""
    plane = np.zeros((1, 1, 1 << 19, 2), dtype=np.uint8)
    plane[..., 0] = np.random.default_rng(1).integers(0, 256, plane.shape[:-1])
    made = wire_form("rans").encode(plane.reshape(-1), 1, plane.shape)
    assert made is not None
    assert len(made) < 0.51 * plane.size
    found = np.empty_like(plane.reshape(-1))
    wire_form("rans").decode(memoryview(made), found, 1)
    assert np.array_equal(found, plane.reshape(-1))


def test_a_plane_of_one_value_takes_little_more_than_a_table_and_states() -> None:
    assert len(coded(np.full(4096, 7, dtype=np.uint8))) < 80


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda code: b"", "it ends where tables or states are due"),
    "another size": (lambda code: b"\xff\xff\xff\xff" + code[4:], "4294967295 bytes where 4096 are due"),
    "an alphabet": (lambda code: code[:4] + b"\x02" + code[5:], "alphabet 2 is unknown"),
    "no table": (lambda code: code[:5] + b"\0" + code[6:], "0 tables"),
    "17 tables": (lambda code: code[:5] + b"\x11" + code[6:], "17 tables"),
    "no columns": (lambda code: code[:6] + b"\0\0" + code[8:], "0 columns in 4096 bytes"),
    "many columns": (lambda code: code[:6] + b"\xff\xff\xff\xff" + code[10:], "4294836225 columns in 4096 bytes"),
    "no symbol": (lambda code: code[:TABLE] + b"\0\0" + code[TABLE + 2 :], "a table has no symbol"),
    "too much": (
        lambda code: code[:TABLE] + b"\xff\xff\xff\xff" + code[TABLE + 4 :],
        "frequencies of a table do not sum to 2048",
    ),
    "a word less": (lambda code: code[:-2], "it ends before all symbols are decoded"),
    "half a word more": (lambda code: code + b"\0", "1 bytes are left where none are due"),
    "words more": (lambda code: code + bytes(64), "64 bytes are left where none are due"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_hostile_code_is_refused_by_name(fault: str) -> None:
    plane = nibbles(1, 2)
    damage, words = FAULTS[fault]
    assert words in refused(damage(coded(plane)), plane)


def test_states_out_of_range_are_refused() -> None:
    plane = nibbles(3, 5)
    flat = wire_form("rans").encode(plane, 1)
    assert flat is not None
    for state in (b"\0\0\0\0", b"\xff\x7f\0\0", b"\0\0\0\x80"):
        found = set()
        for at in range(TABLE, TABLE + 80):
            try:
                wire_form("rans").decode(memoryview(flat[:at] + state + flat[at + 4 :]), np.empty_like(plane), 1)
            except ValueError as error:
                found.add(str(error))
        assert "rans: a state lies outside its range" in found


@given(seed=st.integers(0, 1000), spread=st.integers(1, 8), cut=st.integers(0, 4096), data=st.data())
def test_mutations_are_refused_or_fill_the_plane(seed: int, spread: int, cut: int, data: st.DataObject) -> None:
    """Several bytes change, anywhere or among tables and states, and the end may be missing."""
    plane = nibbles(seed, spread)
    code = bytearray(coded(plane))
    near = min(len(code), data.draw(st.sampled_from([TABLE, 300, len(code)])))
    for _ in range(data.draw(st.integers(1, 6))):
        code[data.draw(st.integers(0, near - 1))] = data.draw(st.integers(0, 255))
    guarded = np.full(plane.size + 128, 0xA5, dtype=np.uint8)
    with suppress(ValueError):
        wire_form("rans").decode(memoryview(bytes(code[: max(1, len(code) - cut)])), guarded[64:-64], 1)
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[-64:] == 0xA5).all()
