"""Device functions that read a page in the order of `layout.py`: bytes to matrix operands, words to metadata.

W warps read W pages at once: axis 0 of every tensor is the warp, and nothing crosses from one warp to another.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_tile(codes, index: tl.constexpr, W: tl.constexpr):
    """Stored tile `index` of W pages whose codes begin at `codes` [W] uint8: int8 [W, 16, 32].

    One 16-byte load per lane; the reordering names registers and moves nothing.
    """
    packed = tl.load(codes[:, None] + (index * 512 + tl.arange(0, 512))[None, :])
    split = tl.reshape(packed.to(tl.int8, bitcast=True), (W, 8, 4, 2, 2, 4))
    return tl.reshape(tl.permute(split, (0, 4, 1, 3, 2, 5)), (W, 16, 32))


@triton.jit
def load_row(codes, row: tl.constexpr, across: tl.constexpr, W: tl.constexpr):
    """Row `row` of the stored tiles, `across` of them side by side: int8 [W, 16, 32·across]."""
    tile = load_tile(codes, row * across, W)
    if across == 2:
        tile = tl.permute(tl.join(tile, load_tile(codes, row * across + 1, W)), (0, 1, 3, 2))
    if across == 4:
        even = tl.join(tile, load_tile(codes, row * across + 2, W))
        odd = tl.join(load_tile(codes, row * across + 1, W), load_tile(codes, row * across + 3, W))
        tile = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))
    return tl.reshape(tile, (W, 16, 32 * across))


@triton.jit
def field(tiles, index: tl.constexpr, bits: tl.constexpr):
    """Codes in bit field `index`, as int8 worth code·2^(bits·index), less 128 in the last field."""
    mask: tl.constexpr = ((1 << bits) - 1) << (bits * index)
    signed: tl.constexpr = mask - 256 if mask > 127 else mask
    if INTERPRETED:
        return tiles & signed
    # Four codes per instruction, said outright: Triton keeps LLVM from finding that out on sm_80.
    masks = tl.full(tiles.shape, signed, tl.int8)
    return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [tiles, masks], tl.int8, is_pure=True, pack=4)


@triton.jit
def load_unit(meta, unit: tl.constexpr, W: tl.constexpr):
    """Scale and minimum of a unit of W pages whose metadata begin at `meta` [W] uint8: two of FP32 [W, 16]."""
    place = (unit // 2) * 32 + (unit % 2) * 2 + tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 2)[None, :]
    words = tl.load(meta.to(tl.pointer_type(tl.int32))[:, None, None] + place[None, :, :])
    words = tl.reshape(tl.permute(words, (0, 2, 1)), (W, 16))
    scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def load_sums(sums, wide: tl.constexpr, unit: tl.constexpr, W: tl.constexpr):
    """Sums (int16 if `wide`, else uint8) of a unit of W pages, which begin at `sums` [W] uint8: INT32 [W, 16]."""
    row = tl.arange(0, 16)
    place = (unit // 2) * 32 + (row % 8) * 4 + (unit % 2) * 2 + row // 8
    pointer = sums.to(tl.pointer_type(tl.int16)) if wide else sums
    return tl.load(pointer[:, None] + place[None, :]).to(tl.int32)


@triton.jit
def equal_halves(x, W: tl.constexpr, N: tl.constexpr):
    """[W, 16, N] whose rows are equal as [W, 8, N]: a lane holds rows r and r + 8, so nothing moves."""
    halves = tl.permute(tl.reshape(x, (W, 2, 8, N)), (0, 2, 3, 1))
    return tl.split(halves)[0]


@triton.jit
def doubled(x, W: tl.constexpr, N: tl.constexpr):
    """[W, 8, N] whose rows are equal as [W, 16, N]: the same registers, each named twice."""
    return tl.reshape(tl.permute(tl.join(x, x), (0, 3, 1, 2)), (W, 16, N))
