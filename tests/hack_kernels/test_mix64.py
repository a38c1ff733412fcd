"""One checksum, three ways to compute it: the definition, C++ and Triton agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.cpu.extension import compiled
from hack_kernels.mix64 import mix64
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**64 - 1)
DATA = st.binary(max_size=200)


def in_cpp(data: bytes | memoryview, seed: int) -> int:
    return int(compiled().mix64(data, seed))


def test_a_value_that_never_changes() -> None:
    """It crosses processes, so it is a format."""
    assert mix64(bytes(range(19)), 2**64 - 1) == 0xAAC5A1328FF0EC48


@given(DATA, SEEDS, st.integers(0, 7))
def test_cpp_is_the_definition_wherever_the_bytes_begin(data: bytes, seed: int, begins: int) -> None:
    assert in_cpp(memoryview(bytes(begins) + data)[begins:], seed) == mix64(data, seed)


@given(data=st.binary(max_size=3 * 8 * 1024), seed=SEEDS, begins=st.integers(0, 7))
@settings(max_examples=10)
def test_triton_is_the_definition_wherever_the_bytes_begin(data: bytes, seed: int, begins: int) -> None:
    triton = pytest.importorskip("hack_kernels.triton.mix64")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lying = torch.tensor([*bytes(begins), *data], dtype=torch.uint8, device=device)
    assert triton.mix64(lying[begins:], seed) == mix64(data, seed)


@given(st.binary(min_size=1, max_size=64), SEEDS, st.data())
def test_a_changed_byte_a_longer_tail_and_another_seed_change_it(data: bytes, seed: int, draw: st.DataObject) -> None:
    changed = bytearray(data)
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    told = in_cpp(data, seed)
    assert told != in_cpp(bytes(changed), seed)
    assert told != in_cpp(data + b"\0", seed)
    assert told != in_cpp(data, seed ^ 1)


@given(st.binary(min_size=16, max_size=64), SEEDS)
def test_words_that_change_places_change_it(data: bytes, seed: int) -> None:
    moved = data[8:16] + data[:8] + data[16:]
    assert (moved == data) == (in_cpp(moved, seed) == in_cpp(data, seed))
