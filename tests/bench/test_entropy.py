"""`bench.entropy` on known cases: entropies, lossless deltas, and bytes as in frames."""

from __future__ import annotations

import math

import pytest
import torch
from hack_kernels.delta_format import GROUP_ROWS

from bench.entropy import (
    FORMS,
    FRAME_PAGES,
    KINDS,
    bits_by_channel,
    bits_by_layer,
    deltas_of_codes,
    entropy_bits,
    frames,
    group_format,
    measured,
    spent,
    values,
    wire_bits,
)
from bench.rooms import PAGE
from hackkv.wire_form import wire_form

PAGES, HEADS, DIM = FRAME_PAGES + 1, 2, 32


def rows() -> torch.Tensor:
    """Rows [pages, Hkv, Π, D] FP16 with a different mean in each channel, like keys."""
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(PAGES, HEADS, PAGE, DIM, generator=draw) + 3 * torch.randn(DIM, generator=draw)).half()


def test_entropies_that_are_known() -> None:
    symbols = torch.arange(8, dtype=torch.uint8).repeat(10)
    assert entropy_bits(symbols) == pytest.approx(80 * 3)
    assert entropy_bits(torch.full((50,), 7, dtype=torch.uint8)) == 0
    channels = (torch.arange(DIM) % 4).to(torch.uint8).expand(PAGES, HEADS, PAGE, DIM)
    assert bits_by_channel(channels) == 0  # each channel has one symbol, all together have four
    assert bits_by_layer(channels) == pytest.approx(2 * channels.numel())


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 20])
def test_deltas_of_codes_lose_nothing(name: str, layer: int) -> None:
    x = rows()
    ([codes], _), read = values(name, layer, x)
    ([anchors, others], _), same = deltas_of_codes(name, layer, x)
    centre = group_format(layer, DIM).side(name).centre
    row = torch.arange(PAGE)
    is_anchor, group = row % GROUP_ROWS == 0, row // GROUP_ROWS
    back = torch.empty_like(codes, dtype=torch.int64)
    back[..., is_anchor, :] = anchors.long()
    back[..., ~is_anchor, :] = (others.long() - centre + anchors.long()[..., group[~is_anchor], :]) % (2 * centre + 1)
    assert torch.equal(back, codes.long())
    assert torch.equal(read, same)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_for_each_channel_takes_no_more_than_one_for_all(kind: str, name: str) -> None:
    """Both take fewer bits than the codes have. The error is that of few bins."""
    channel, layer, wire, in_order, error = measured(KINDS[kind], name, 20, rows())
    assert 0 < channel <= layer < 8
    assert 0 < wire < 8
    assert 0 < in_order < 8
    assert 0 < error < 0.05


def test_what_does_not_shrink_counts_as_it_rests() -> None:
    noise = torch.randint(0, 256, (PAGES, HEADS, 16, DIM), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    assert wire_bits({"noise": noise}) == 8 * noise.nbytes
    assert wire_bits({"zeros": torch.zeros_like(noise)}) < math.ceil(noise.nbytes / 10)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_codes_is_measured(form: str) -> None:
    (_, planes), _ = values("k", 20, rows())
    cut = list(frames(planes))
    packed, size, encode_s, decode_s = spent(wire_form(form), cut)
    assert packed == sum(plane.nbytes for part in cut for plane in part.values())
    assert 0 < size < packed
    assert encode_s >= 0 <= decode_s
