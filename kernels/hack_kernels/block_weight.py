"""Weights as codes of 4 or 8 bits: the forms in which a model's matrices rest packed, and their definition in torch.

A *block* is 32 columns of a row, with a scale d in FP16 and, for 4 bits, a minimum m in FP16 too. A value is
(code - 128) d with 8 bits, code d + m with 4. These forms hold GGUF's Q8_0 and Q4_1 exactly, and Q4_0 with m = -8 d. In
memory 16 rows are side by side, as processors multiply them: for every block the codes, the 16 scales, the 16 minima.

A product rounds rows of x to two bytes, each block of 32 with a scale of its own. It multiplies integers and adds
blocks in FP32. The error of a value of x is at most a 64,000th of the largest of its block.

For rows in BF16 and codes of 4 bits, one byte is enough for most blocks, with half the products. The error of a value
is then at most a 254th of the largest of its block. Blocks that stand out keep two bytes: their largest value is more
than `STANDS_OUT` times the mean of the largest values of the row's blocks. With one byte they would cause most of the
error. `python -m bench.rounding` measures what each way costs a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK: Final = 32
"""Columns that share a scale."""
TILE: Final = 16
"""Rows side by side."""
WIDTHS: Final = (4, 8)
LARGEST: Final = 127 * 254
"""The largest value of a block of x becomes this. Kernels hold a value as two digits of base 254, a byte each."""
LARGEST_DIGIT: Final = 127
"""The largest value of a block of x becomes this where one byte is enough."""
STANDS_OUT: Final = 2.0
SMALLEST: Final = 1e-30
"""Values of a block of x that are all smaller count as 0."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix [rows, columns] as codes; columns are a multiple of `BLOCK`."""

    data: Tensor
    """[ceil(rows / 16), columns / 32, `record_bytes(bits)`] uint8, contiguous."""
    rows: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return next(bits for bits in WIDTHS if record_bytes(bits) == self.data.shape[-1])

    @property
    def shape(self) -> torch.Size:
        """(rows, columns)"""
        return torch.Size((self.rows, self.data.shape[1] * BLOCK))

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.data.nbytes

    def unpacked(self, dtype: torch.dtype = torch.float32, ids: Tensor | None = None) -> Tensor:
        """The rows `ids`, or all, as numbers: [rows, columns], computed in float32."""
        data = self.data if ids is None else self.data[ids // TILE]
        tiles, blocks, _ = data.shape
        halves = data[..., 16 * BLOCK * self.bits // 8 :].contiguous().view(torch.float16)
        scale, minimum = halves.view(tiles, blocks, -1, TILE).float()[:, :, (0, -1)].permute(2, 0, 3, 1)[..., None]
        quads = data[..., : TILE * BLOCK * self.bits // 8].view(tiles, blocks, self.bits, TILE, 4)
        codes = quads.permute(0, 3, 1, 2, 4).reshape(tiles, TILE, blocks, -1)
        values: Tensor
        if self.bits == 4:
            values = torch.cat((codes & 15, codes >> 4), dim=-1) * scale + minimum
        else:
            values = (codes.float() - 128) * scale
        if ids is None:
            return values.view(tiles * TILE, -1)[: self.rows].to(dtype)
        return values[torch.arange(tiles, device=ids.device), ids % TILE].view(tiles, -1).to(dtype)


Weight: TypeAlias = Tensor | BlockWeight
"""A matrix [out, in], as numbers or packed."""
Matrices: TypeAlias = tuple[Weight, Weight, Weight]
"""The matrices of a layer after its attention: out [n, m], gate_up [2 f, n] and down [n, f]."""
Norms: TypeAlias = tuple[Tensor, Tensor]
"""Weights [n] of the norm before the feed-forward, and of the norm before the next layer."""


Codes: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Codes uint8 [rows, columns], scales and, for 4 bits, minima float16 [rows, columns / 32]."""


def as_numbers(weight: Weight) -> Tensor:
    """A packed weight unpacked to float32; any other weight as it is."""
    return weight.unpacked() if isinstance(weight, BlockWeight) else weight


def record_bytes(bits: int) -> int:
    """Bytes of a block of 16 rows."""
    return TILE * (BLOCK * bits // 8 + (4 if bits == 4 else 2))


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int, int]:
    """The shape of `BlockWeight.data` for a matrix of `shape`."""
    rows, columns = shape
    return -(-rows // TILE), columns // BLOCK, record_bytes(bits)


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` can be packed."""
    return len(shape) == 2 and shape[1] % BLOCK == 0


def pack(codes: Tensor, scale: Tensor, minimum: Tensor | None) -> BlockWeight:
    """Rows of codes, scales and minima (`Codes`) as a `BlockWeight`. Zeros fill the last tile up."""
    rows, columns = codes.shape
    tiles, blocks = -(-rows // TILE), columns // BLOCK
    missing = (0, 0, 0, tiles * TILE - rows)
    codes = F.pad(codes, missing).view(tiles, TILE, blocks, BLOCK)
    if minimum is not None:
        codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    quads = codes.view(tiles, TILE, blocks, -1, 4).permute(0, 2, 3, 1, 4).flatten(2)
    parts = [quads]
    for halves in (scale, minimum):
        if halves is not None:
            lanes = F.pad(halves, missing).view(tiles, TILE, blocks).transpose(1, 2).contiguous()
            parts.append(lanes.view(torch.uint8))
    return BlockWeight(torch.cat(parts, dim=-1), rows)


def quantized(weight: Tensor, bits: int) -> BlockWeight:
    """`weight` as its nearest codes: of 8 bits around zero, of 4 bits between a block's smallest and largest value."""
    return pack(*nearest_codes(weight, bits))


def nearest_codes(weight: Tensor, bits: int) -> Codes:
    """The nearest codes of a matrix of numbers, with scales and minima."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    if bits == 8:
        scale, minimum = (blocks.abs().amax(-1) / 127).half(), None
        levels = blocks / _divisor(scale) + 128
    else:
        low, high = blocks.aminmax(dim=-1)
        scale, minimum = ((high - low) / 15).half(), low.half()
        levels = (blocks - minimum.float()[..., None]) / _divisor(scale)
    codes = levels.round().clamp(0, 2**bits - 1).to(torch.uint8)
    return codes.flatten(1), scale, minimum


def _divisor(scale: Tensor) -> Tensor:
    """[.., 1] float32: a scale of 0 divides by 1, as all values of its block are the same then."""
    return scale.float().masked_fill(scale == 0, 1)[..., None]


def rounded_rows(x: Tensor, bits: int) -> Tensor:
    """Rows [T, columns] rounded by blocks, in float32, as products with codes of `bits` bits take them.

    A block with a value that is not finite becomes NaN.
    """
    largest = x.float().unflatten(1, (-1, BLOCK)).abs().amax(-1)
    if x.dtype != torch.bfloat16 or bits > 4:
        return rounded_to(x, torch.full_like(largest, LARGEST))
    total = torch.zeros_like(largest[:, 0])
    for each in largest.unbind(1):  # summed one by one, so that every instruction set comes to the same result
        total += each
    most = total * torch.full_like(total, STANDS_OUT).div(largest.shape[1])
    return rounded_to(x, torch.where(largest > most[:, None], float(LARGEST), float(LARGEST_DIGIT)))


def rounded_to(x: Tensor, levels: Tensor) -> Tensor:
    """Rows rounded by blocks, in float32, where the largest value of a block becomes `levels` [T, blocks]."""
    blocks, levels = x.float().unflatten(1, (-1, BLOCK)), levels[..., None]
    largest = blocks.abs().amax(-1, keepdim=True)
    faults = (blocks - blocks).sum(-1, keepdim=True)
    # Not levels / largest, which torch computes as a reciprocal and a product: that rounds twice.
    inverse = levels.div(largest).masked_fill(largest <= SMALLEST, 0)
    rounded: Tensor = (blocks * inverse).round() * (largest / levels + faults)
    return rounded.flatten(1)
