"""The layout of pages on a GPU: the documented place of every code, and conversions in both directions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hack_kernels.hack_format import HEAD_DIMS, PAGE_TOKENS, Arithmetic, HackFormat
from hack_kernels.triton.code_tiles import CODE_BITS, TILE_BYTES, CodeTiles
from hack_kernels.triton.layout import check_records, from_wire, new_pages, page_layout, to_wire
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import reference

FORMATS = [
    HackFormat(d, pi, kb, vb, arithmetic=a)
    for d, pi, kb, vb, a in itertools.product(HEAD_DIMS, PAGE_TOKENS, CODE_BITS, CODE_BITS, Arithmetic)
]


def random_wire(fmt: HackFormat, seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    planes = {}
    for plane in fmt.planes:
        nbytes = plane.dtype.itemsize
        raw = torch.randint(0, 256, (*lead, *plane.shape, nbytes), dtype=torch.uint8, generator=generator)
        planes[plane.name] = raw.view(plane.dtype).squeeze(-1)
    return planes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_any_bytes_survive_the_way_there_and_back(fmt: HackFormat) -> None:
    wire = random_wire(fmt, 1, 3, 2)
    resting = from_wire(fmt, wire)
    pool = new_pages(fmt, 3, 2, "cpu")
    for name, plane in resting.items():
        assert pool[name].shape == plane.shape
        pool[name].copy_(plane)
    back = to_wire(fmt, pool)
    assert all(same_bits(back[name], plane) for name, plane in wire.items())


@settings(max_examples=200)
@given(data=st.data(), fmt=st.sampled_from(FORMATS), of_k=st.booleans())
def test_every_code_lies_where_the_docstring_says(data: st.DataObject, fmt: HackFormat, of_k: bool) -> None:
    tiles = page_layout(fmt).k_tiles if of_k else page_layout(fmt).v_tiles
    row = data.draw(st.integers(0, tiles.rows - 1))
    column = data.draw(st.integers(0, tiles.columns - 1))
    code = data.draw(st.integers(1, 2**tiles.bits - 1))
    codes = torch.zeros(tiles.rows, tiles.columns, dtype=torch.uint8)
    codes[row, column] = code
    packed = tiles.pack(codes) ^ 0x80
    (found,) = packed.nonzero().flatten().tolist()
    stored, byte = divmod(found, TILE_BYTES)
    j, t = divmod(stored, tiles.across)
    lane, b = divmod(byte, 16)
    c, r = divmod((int(packed[found]).bit_length() - 1) // tiles.bits, tiles.row_fields)
    assert int(packed[found]) >> tiles.bits * (c * tiles.row_fields + r) == code
    assert row == 16 * (j * tiles.row_fields + r) + lane // 4 + 8 * (b // 4 % 2)
    place = 4 * (lane % 4) + b % 4
    within = place // 2 + 8 * (place % 2) if tiles.zipped else place
    assert column == 32 * (t * tiles.column_fields + c) + within + 16 * (b // 8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_lane_finds_the_metadata_of_its_rows_side_by_side(fmt: HackFormat) -> None:
    token, group, channel = 27, fmt.k_groups - 1, fmt.head_dim - 5
    wire = {name: torch.zeros_like(plane) for name, plane in random_wire(fmt, 2).items()}
    wire["k_scale"][token, group], wire["v_min"][channel] = 1, 1
    resting = from_wire(fmt, wire)
    unit = group * (fmt.page_tokens // 16) + token // 16
    assert resting["k_scale"][unit // 2, token % 8, unit % 2, token // 8 % 2] == 1
    assert resting["v_min"][channel // 32, channel % 8, channel // 16 % 2, channel // 8 % 2] == 1
    assert resting["k_scale"].count_nonzero() == resting["v_min"].count_nonzero() == 1


def test_a_record_is_as_large_as_the_page_on_the_wire() -> None:
    """This holds at the default format. Only head_dim 96 and 2-bit K in pages of 32 x 96 leave fields empty."""
    assert page_layout(HackFormat(128, 64)).nbytes == 5120
    assert page_layout(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC)).nbytes == 5376
    assert CodeTiles(96, 64, 2).nbytes == 2048
    assert CodeTiles(32, 96, 2).nbytes == 1024
    for rows, columns, bits in itertools.product((64, 128, 256), PAGE_TOKENS, CODE_BITS):
        assert (
            CodeTiles(rows, columns, bits).nbytes == CodeTiles(columns, rows, bits).nbytes == rows * columns * bits // 8
        )


def test_pools_that_are_not_views_into_records_are_refused() -> None:
    fmt = HackFormat(64, 32, arithmetic=Arithmetic.ASYMMETRIC)
    pages = new_pages(fmt, 3, 4, "cpu")
    check_records(fmt, pages)
    check_records(fmt, {name: plane[:, 1:3] for name, plane in pages.items()})
    with pytest.raises(ValueError, match="plane v_min does not lie"):
        check_records(fmt, pages | {"v_min": pages["v_min"].clone()})
    with pytest.raises(ValueError, match="k_codes has strides"):
        check_records(fmt, *reference(fmt).new_planes([fmt], 3, 4))


def test_an_empty_pool_exports_zeros() -> None:
    fmt = HackFormat(96, 32)
    wire = to_wire(fmt, new_pages(fmt, 1, 1, "cpu"))
    assert all(int(plane.count_nonzero()) == 0 for plane in wire.values())
