"""XXH3-64 of bytes where they lie, equal to `xxhash`, so that a frame that arrives on a GPU is checked there.

XXH3 reads 1024 bytes, a block, as 16 stripes. A block's addition to the 8 accumulators does not depend on their values,
so all blocks are read at once (`block_sums_kernel`). Between blocks the accumulators are scrambled, one block after
another (`chain_kernel`: 8 numbers a block). The host folds the last 8. Source: the XXH3 specification of xxHash 0.8.
Inputs of up to 240 bytes have other rules and are left to the host.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.triton.launch import Launch

LEAST: Final = 241
"""Bytes of the shortest input to which these rules apply."""
BLOCK_BYTES: Final = 1024
SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee035"
    "90e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04b"
    "cdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad0"
    "31ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
START: Final = (P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1)
"""The accumulators before the first block."""
_MASK: Final = 2**64 - 1
_SCRAMBLE: Final = tl.constexpr(P32_1)
_WORDS: Final = 24
_TAIL: Final = tl.constexpr(_WORDS)
"""Where in `keys` the last stripe's 8 words begin. In the secret they are not aligned to the other words."""
_START: Final = tl.constexpr(_WORDS + 8)
"""Where `START` begins."""


@triton.jit
def added(value, swapped, key):
    """The number that a word and its neighbour add to the word's accumulator."""
    mixed = value ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32) + swapped


@triton.jit(do_not_specialize=["nbytes"])
def block_sums_kernel(data, keys, sums, nbytes):
    """`sums` [blocks, 8]: each block's addition, for `data` [nbytes]. The last block adds the last 64 bytes once
    more."""
    block = tl.program_id(0).to(tl.int64)
    stripe, lane = tl.arange(0, 16), tl.arange(0, 8)
    words = data.to(tl.pointer_type(tl.uint64)) + block * 128 + (stripe * 8)[:, None]
    full = (stripe < (nbytes - 1 - block * 1024) // 64)[:, None]
    value = tl.load(words + lane[None, :], mask=full, other=0)
    swapped = tl.load(words + (lane ^ 1)[None, :], mask=full, other=0)
    key = tl.load(keys + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
    total = tl.sum(tl.where(full, added(value, swapped, key), 0), axis=0)

    is_last = block == tl.num_programs(0) - 1
    byte = tl.arange(0, 8)
    tail = data + (nbytes - 64)
    pieces = tl.load(tail + lane[:, None] * 8 + byte[None, :]).to(tl.uint64)
    others = tl.load(tail + (lane ^ 1)[:, None] * 8 + byte[None, :]).to(tl.uint64)
    shift = (byte * 8)[None, :].to(tl.uint64)
    key = tl.load(keys + _TAIL + lane).to(tl.uint64, bitcast=True)
    last = added(tl.sum(pieces << shift, axis=1), tl.sum(others << shift, axis=1), key)
    total += tl.where(is_last, last, 0)
    tl.store(sums + block * 8 + lane, total.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["blocks"])
def chain_kernel(sums, keys, out, blocks):
    """`out` [8]: the accumulators after all blocks."""
    lane = tl.arange(0, 8)
    key = tl.load(keys + 16 + lane).to(tl.uint64, bitcast=True)
    state = tl.load(keys + _START + lane).to(tl.uint64, bitcast=True)
    for block in range(blocks - 1):
        state += tl.load(sums + block * 8 + lane).to(tl.uint64, bitcast=True)
        state = (state ^ state >> 47 ^ key) * _SCRAMBLE
    state += tl.load(sums + (blocks - 1) * 8 + lane).to(tl.uint64, bitcast=True)
    tl.store(out + lane, state.to(tl.int64, bitcast=True))


def xxh3_launches(data: Tensor, keys: Tensor, out: Tensor) -> tuple[Launch, Launch]:
    """The launches that write to `out`, int64 [8], the accumulators of `data`, uint8 [at least 241], contiguous.

    `data` begins at a multiple of 8. `keys` is int64 [40]: the words of the secret, those of the last stripe, and
    `START`.
    """
    blocks = (data.numel() - 1) // BLOCK_BYTES + 1
    sums = torch.empty((blocks, 8), dtype=torch.int64, device=data.device)
    read = {"data": data, "keys": keys, "sums": sums, "nbytes": data.numel()}
    fold = {"sums": sums, "keys": keys, "out": out, "blocks": blocks}
    return Launch(block_sums_kernel, (blocks,), read, warps=4), Launch(chain_kernel, (1,), fold, warps=1)


def xxh3_64(pieces: Sequence[Tensor], seed: int) -> list[int]:
    """XXH3-64 of each piece; see `xxh3_launches`. Waits for the device, once for all of them."""
    if not pieces:
        return []
    secret = secret_of(seed)
    keys = [*_words(secret, 0, _WORDS), *_words(secret, len(secret) - 64 - 7, 8), *START]
    lying = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=pieces[0].device)
    out = torch.empty((len(pieces), 8), dtype=torch.int64, device=pieces[0].device)
    for data, state in zip(pieces, out, strict=True):
        for launch in xxh3_launches(data, lying, state):
            launch.run()
    return [
        folded([word & _MASK for word in words], secret, data.numel())
        for data, words in zip(pieces, out.tolist(), strict=True)
    ]


def secret_of(seed: int) -> bytes:
    """XXH3's secret for a seed in 0 .. 2**64 - 1."""
    words = _words(SECRET, 0, _WORDS)
    return struct.pack("<24Q", *((word - seed if i % 2 else word + seed) & _MASK for i, word in enumerate(words)))


def folded(state: Sequence[int], secret: bytes, nbytes: int) -> int:
    """The checksum that 8 accumulators give after `nbytes` bytes."""
    keys, total = _words(secret, 11, 8), nbytes * P64_1
    for i in range(0, 8, 2):
        product = (state[i] ^ keys[i]) * (state[i + 1] ^ keys[i + 1])
        total += (product & _MASK) ^ product >> 64
    total &= _MASK
    total = (total ^ total >> 37) * 0x165667919E3779F9 & _MASK
    return total ^ total >> 32


def _words(secret: bytes, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", secret, at)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
