"""Error-bounded codes under Huffman codes: the bound, codes for every symbol, sizes that fit every page, damage."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hack_kernels.huffman_format import (
    LONGEST,
    MOST_SYMBOLS,
    RUNGS,
    SLACK_BYTES,
    SLICES,
    SPREADS,
    HuffmanFormat,
    HuffmanSide,
    Unit,
    books_of,
    code_lengths,
)
from hack_kernels.reference.huffman import HuffmanReference, decoded, encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.reading import HUFFMANS

ALPHABETS = sorted({HuffmanSide(Unit.TOKEN, scale, 4).symbols for scale in (0.02, 0.05, 0.15, 0.25, 0.3, 0.5)})


def step_of(fmt: HuffmanFormat, name: str, planes: dict[str, Tensor]) -> Tensor:
    """The step s of every value, in a shape that broadcasts to [..., Π, D]."""
    step = planes[f"{name}_step"].double()
    return step[..., None] if fmt.side(name).unit is Unit.TOKEN else step[..., None, :]


@pytest.mark.parametrize("fmt", HUFFMANS, ids=str)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31), loud=st.floats(1e-7, 60000.0), apart=st.floats(-65504.0, 65504.0), flat=st.booleans()
)
def test_errors_are_at_most_half_a_step(fmt: HuffmanFormat, seed: int, loud: float, apart: float, flat: bool) -> None:
    """Rows are near zero or far from it, with any spread. A step is ρ of the range, unless the page did not fit."""
    rows = random_rows(seed, 2, 1, fmt.page_tokens, fmt.head_dim)
    rows = (rows.sign() if flat else rows) * loud + apart
    rows = rows.clamp(-65504, 65504).half()
    kernels = HuffmanReference(fmt, CPU)
    for name in ("k", "v"):
        side, planes = fmt.side(name), kernels.quantize(name, rows)
        found, x, step = kernels.dequantize(name, planes).double(), rows.double(), step_of(fmt, name, planes)
        assert bool(((found - x).abs() <= step / 2 * (1 + 2**-9) + x.abs() * 2**-22).all())
        axes = {Unit.BLOCK: (-2, -1), Unit.CHANNEL: (-2,), Unit.TOKEN: (-1,)}[side.unit]
        spread, amax = x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True), x.abs().amax(axes, keepdim=True)
        wanted = [torch.maximum(spread * rung, amax * 2**-14).clamp(max=65504) for rung in side.rungs]
        assert bool((step >= wanted[0] * (1 - 2**-20)).all())
        assert bool((step <= wanted[-1] * (1 + 2**-9) + 2**-24 + (amax == 0)).all())


@pytest.mark.parametrize("fmt", HUFFMANS, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -(2.0**-24), -65504.0])
def test_a_range_of_zero_is_exact(fmt: HuffmanFormat, value: float) -> None:
    rows = torch.full((1, 1, fmt.page_tokens, fmt.head_dim), value, dtype=torch.float16)
    kernels = HuffmanReference(fmt, CPU)
    for name in ("k", "v"):
        assert torch.equal(kernels.dequantize(name, kernels.quantize(name, rows)), rows.float())


def test_a_page_that_does_not_fit_takes_the_first_step_with_which_it_does() -> None:
    """Evenly spread values need the most bits. With less room the step is a later one of `RUNGS`."""
    x = torch.linspace(-1, 1, 64 * 64).view(1, 1, 64, 64).half()
    steps = []
    for room in (8.0, 4.5, 4.0, 3.5, 3.0, 2.0):
        fmt = HuffmanFormat(64, HuffmanSide(Unit.BLOCK, 0.05, room), HuffmanSide(Unit.TOKEN, 0.15, 3))
        planes = HuffmanReference(fmt, CPU).quantize("k", x)
        assert int(planes["k_sizes"].sum()) <= planes["k_codes"].shape[-1] - SLACK_BYTES
        steps.append(float(planes["k_step"]) / 2)
    assert steps[0] == pytest.approx(0.05, rel=2**-10)
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    for step in steps:
        assert min(abs(step / 0.05 - rung) for rung in (*RUNGS, 20.0)) < 0.02


@pytest.mark.parametrize("symbols", ALPHABETS)
def test_every_symbol_has_a_code_and_any_bits_are_codes(symbols: int) -> None:
    """Books are complete prefix codes of at most 12 bits. The first one needs 2 bits for codes of the largest step."""
    books = books_of(symbols)
    assert books.codes.shape == (len(SPREADS), symbols)
    for entries, lookup in zip(books.codes.tolist(), books.lookup.tolist(), strict=True):
        lengths = [entry >> 16 for entry in entries]
        assert min(lengths) >= 1
        assert max(lengths) <= LONGEST
        assert sum(Fraction(1, 2**bits) for bits in lengths) == 1
        for word in range(0, 1 << LONGEST, 31):
            bits, *found, first, nothing, count = lookup[word].to_bytes(8, "little")
            assert first == lengths[found[0]]
            assert nothing == 0
            left, used = word, 0
            for symbol in found[:count]:
                assert entries[symbol] == (left & (1 << lengths[symbol]) - 1 | lengths[symbol] << 16)
                left, used = left >> lengths[symbol], used + lengths[symbol]
            assert used == bits <= LONGEST
            assert found[count:] == [0] * (MOST_SYMBOLS - count)
            following = next(
                symbol for symbol, bits in enumerate(lengths) if entries[symbol] & 0xFFFF == left & (1 << bits) - 1
            )
            assert count == MOST_SYMBOLS or used + lengths[following] > LONGEST
    assert all(int(books.codes[0, u]) >> 16 <= 2 for u in (0, 1, symbols - 1))


@settings(max_examples=30)
@given(weights=st.lists(st.integers(1, 10**9), min_size=2, max_size=52), longest=st.integers(6, 12))
def test_codes_are_the_best_of_their_longest(weights: list[int], longest: int) -> None:
    """Without a limit, Huffman's own algorithm gives the least cost."""

    def cost(lengths: list[int]) -> int:
        return sum(weight * bits for weight, bits in zip(weights, lengths, strict=True))

    lengths = code_lengths(weights, longest)
    assert max(lengths) <= longest
    assert sum(Fraction(1, 2**bits) for bits in lengths) == 1
    heap, total = sorted(weights), 0
    while len(heap) > 1:
        total += heap[0] + heap[1]
        heap = sorted([*heap[2:], heap[0] + heap[1]])
    assert cost(lengths) >= total
    assert cost(code_lengths(weights, len(weights))) == total


@pytest.mark.parametrize("symbols", ALPHABETS)
def test_symbols_that_no_book_expects_come_back(symbols: int) -> None:
    """Each book codes every symbol, including the rarest, at each place of a slice."""
    books, count = books_of(symbols), SLICES * symbols
    slices = [torch.arange(symbols).roll(turn) for turn in range(SLICES)]
    sent = torch.stack([torch.cat(slices)] * len(SPREADS))
    entries = books.codes.gather(1, sent)
    sizes, coded = encoded(entries, 2 * count + SLACK_BYTES)
    assert torch.equal(decoded(books.lookup, sizes, coded, count), sent)
    written = [int(size) for size in sizes.sum(-1)]
    assert all(not bool(each[size:].any()) for each, size in zip(coded, written, strict=True))


@pytest.mark.parametrize("fmt", HUFFMANS, ids=str)
def test_heads_and_pages_have_the_bytes_that_each_has_alone(fmt: HuffmanFormat) -> None:
    """Therefore heads can be split over processes, and a page that does not fit changes no other page."""
    kernels = HuffmanReference(fmt, CPU)
    rows = random_rows(2, 3, 2, fmt.page_tokens, fmt.head_dim).half()
    rows[1, 1] = torch.linspace(-1, 1, fmt.elements).view(fmt.page_tokens, fmt.head_dim)
    for name in ("k", "v"):
        whole = kernels.quantize(name, rows)
        for page, head in np.ndindex(3, 2):
            alone = kernels.quantize(name, rows[page, head])
            assert all(torch.equal(plane[page, head], alone[key]) for key, plane in whole.items())


def test_wrong_formats_are_named() -> None:
    good = HuffmanSide(Unit.TOKEN, 0.15, 2.5)
    with pytest.raises(ValueError, match=r"k_scale is 0\.01; it must lie between 0\.02 and 0\.5"):
        HuffmanFormat(64, HuffmanSide(Unit.BLOCK, 0.01, 4), good)
    with pytest.raises(ValueError, match=r"v_room is 1\.5; it must lie between 2\.0 and 8\.0"):
        HuffmanFormat(64, good, HuffmanSide(Unit.TOKEN, 0.15, 1.5))
    with pytest.raises(ValueError, match="1 rows of 8 channels are not 16 slices"):
        HuffmanFormat(8, good, good, page_tokens=1)
