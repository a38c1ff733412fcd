"""Partitions, rounding and bit order: the definitions that every backend must meet."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.philox import Coordinates, Tensors, philox4x32, uniform
from hack_kernels.quantize import fp16_down, fp16_up, pack, quantize, unpack
from hypothesis import given
from hypothesis import strategies as st

BITS = st.sampled_from([2, 4])


def rows(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.float16)


@given(
    bits=BITS, groups=st.integers(1, 9), width=st.integers(1, 5), axis=st.sampled_from([0, -1]), seed=st.integers(0, 99)
)
def test_pack_is_a_bijection(bits: int, groups: int, width: int, axis: int, seed: int) -> None:
    shape = (groups * 8 // bits, width) if axis == 0 else (width, groups * 8 // bits)
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits, axis)
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack(packed, bits, axis), codes)
    assert torch.equal(pack(unpack(packed, bits, axis), bits, axis), packed)


def test_bit_order_is_pinned() -> None:
    assert pack(torch.tensor([3, 2, 1, 0], dtype=torch.uint8), 2, axis=0).tolist() == [0b00_01_10_11]
    assert pack(torch.tensor([0xA, 0x3], dtype=torch.uint8), 4, axis=0).tolist() == [0x3A]


@given(bits=BITS, seed=st.integers(0, 10_000), exponent=st.integers(-20, 14), stochastic=st.booleans())
def test_error_is_within_one_scale_or_half_of_it(bits: int, seed: int, exponent: int, stochastic: bool) -> None:
    x = rows(seed, (16, 64), 2.0**exponent).clamp(-65504, 65504)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) if stochastic else None
    quantized = quantize(x, bits, noise)
    error = (x.double() - quantized.dequantize(torch.float64)).abs()
    bound = quantized.scale.double()[..., None] * (1.0 if stochastic else 0.5)
    assert bool((error <= bound * (1 + 1e-6)).all())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -65504.0, 65504.0, 2.0**-24, 0.1])
@pytest.mark.parametrize("bits", [2, 4])
def test_constant_partitions_are_exact(value: float, bits: int) -> None:
    x = torch.full((3, 32), value, dtype=torch.float16)
    for noise in (None, torch.rand(x.shape)):
        quantized = quantize(x, bits, noise)
        assert torch.equal(quantized.dequantize(torch.float64), x.double())
        assert int(quantized.codes.max()) == 0


@given(st.floats(-65504, 65504, width=32))
def test_fp16_rounding_brackets_the_value(value: float) -> None:
    x = torch.tensor([value], dtype=torch.float32)
    down, up = fp16_down(x).double(), fp16_up(x).double()
    assert down <= x.double() <= up
    assert (down == up) == bool(x.to(torch.float16).float() == x)
    steps = fp16_up(x).view(torch.int16).int() - fp16_down(x).view(torch.int16).int()
    assert abs(int(steps)) <= 1 or float(down) * float(up) <= 0


@pytest.mark.parametrize("bits", [2, 4])
def test_stochastic_rounding_is_unbiased_to_2_to_the_minus_17_of_a_step(bits: int) -> None:
    """The mean is over every number that a block can give. FP32 has `steps` to 2^-21 if they are near 2^4."""
    noise = (torch.arange(2**16).float() + 0.5) * 2.0**-16
    x = rows(3, (65, 32))
    for row in x:
        quantized = quantize(row[None, :].expand(2**16, -1), bits, noise[:, None])
        low, scale = quantized.minimum[0].double(), quantized.scale[0].double()
        bias = quantized.codes.double().mean(0) - (row.double() - low) / scale
        assert float(bias.abs().max()) <= 2.0**-17 + 2.0**-20


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("plane", Tensors)
def test_the_mean_of_codes_is_the_value(bits: int, plane: Tensors) -> None:
    trials, channels = 4096, 64
    x = rows(5, (1, channels)).expand(trials, channels)
    noise = uniform(7, Coordinates(3, 0, torch.arange(trials)), 1, channels, plane)[:, 0]
    quantized = quantize(x, bits, noise)
    mean_error = (quantized.dequantize(torch.float64) - x.double()).mean(0).abs()
    assert bool((mean_error <= 4 * quantized.scale[0].double() / (4 * trials) ** 0.5).all())


@pytest.mark.parametrize("bits", [2, 4])
def test_a_value_on_a_level_keeps_its_code_whatever_the_number(bits: int) -> None:
    levels = torch.arange(2**bits, dtype=torch.float32)
    for noise in (2.0**-17, 1 - 2.0**-17):
        assert torch.equal(quantize(levels, bits, torch.full_like(levels, noise)).codes, levels.to(torch.uint8))


def test_numbers_of_a_block_are_uniform_and_uncorrelated() -> None:
    """Bounds are five standard deviations, for every pair of channels that share a block, also between K and V."""
    tokens = 2**14
    positions = torch.arange(tokens)
    where = Coordinates(1, 0, positions)
    numbers = torch.cat([uniform(9, where, 1, 16, plane)[:, 0] for plane in Tensors], dim=1).double()
    assert float((numbers.mean(0) - 0.5).abs().max()) <= 5 / (12 * tokens) ** 0.5
    counts = torch.stack([torch.bincount((column * 16).long(), minlength=16) for column in numbers.T]).double()
    assert float((counts - tokens / 16).abs().max()) <= 5 * (tokens / 16) ** 0.5
    assert float((torch.corrcoef(numbers.T) - torch.eye(32)).abs().max()) <= 5 / tokens**0.5


def test_channels_share_blocks_in_the_order_that_is_pinned() -> None:
    layer, head, position, key = 3, 2, 70_000, (2**40 + 7 & 0xFFFFFFFF, 2**40 >> 32)
    for plane in Tensors:
        noise = uniform(2**40 + 7, Coordinates(layer, 0, torch.tensor([position])), 3, 64, plane)[0, head]
        for channel in (0, 1, 7, 8, 37, 63):
            counter = (layer, head, position, 2 * (channel // 8) + plane)
            a, b, c, d = (torch.tensor(word) for word in counter)
            word = int(philox4x32((a, b, c, d), key)[channel % 8 // 2])
            half = word >> 16 if channel % 2 else word & 0xFFFF
            assert float(noise[channel]) == (half + 0.5) / 65536


def test_philox_matches_the_published_vectors() -> None:
    """The vectors are known answers of Random123's `kat_vectors`, philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    pi = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    known = [
        (((0, 0, 0, 0), (0, 0)), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (((ones,) * 4, (ones, ones)), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for (counter, key), words in known:
        a, b, c, d = (torch.tensor(word) for word in counter)
        assert tuple(int(word) for word in philox4x32((a, b, c, d), key)) == words


def test_noise_depends_on_coordinates_only() -> None:
    """A part of the rows or heads gets the same numbers as within the whole."""
    positions = torch.arange(100, 164)
    where = Coordinates(2, 0, positions)
    whole = uniform(11, where, 3, 32, Tensors.V)
    assert torch.equal(whole[10:20], uniform(11, Coordinates(2, 0, positions[10:20]), 3, 32, Tensors.V))
    assert torch.equal(whole[:, :1], uniform(11, where, 1, 32, Tensors.V))
    assert torch.equal(whole[:, 1:], uniform(11, Coordinates(2, 1, positions), 2, 32, Tensors.V))
    for other in (
        uniform(12, where, 3, 32, Tensors.V),
        uniform(11, Coordinates(3, 0, positions), 3, 32, Tensors.V),
        uniform(11, where, 3, 32, Tensors.K),
    ):
        assert not torch.equal(whole, other)
    assert float(whole.min()) > 0
    assert float(whole.max()) < 1
