"""XXH3 by Triton equals that of `xxhash`."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

xxh3 = pytest.importorskip("hack_kernels.triton.xxh3")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, STRIPE = 1024, 64
EDGES = [241, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + STRIPE, BLOCK + STRIPE + 1, 3 * BLOCK, 3 * BLOCK + 5 * STRIPE + 7]
"""Lengths around multiples of blocks and stripes."""


def lying(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


@given(
    lengths=st.lists(st.sampled_from(EDGES) | st.integers(241, 5 * BLOCK), min_size=1, max_size=3),
    seed=st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_several_pieces_at_once_have_the_checksums_that_the_host_gives_them(
    lengths: list[int], seed: int, random: object
) -> None:
    pieces = [random.randbytes(length) for length in lengths]  # type: ignore[attr-defined]
    due = [xxhash.xxh3_64_intdigest(piece, seed) for piece in pieces]
    assert xxh3.xxh3_64([lying(piece) for piece in pieces], seed) == due


@pytest.mark.parametrize("length", EDGES)
def test_at_every_edge(length: int) -> None:
    data = bytes(i * 7 % 251 for i in range(length))
    assert xxh3.xxh3_64([lying(data)], length) == [xxhash.xxh3_64_intdigest(data, length)]


def test_nothing_has_no_checksums() -> None:
    assert xxh3.xxh3_64([], 1) == []
