"""Prompts attended to in FP16: pages are dequantized into rows first, then tiles of queries read one after another.

A query sees the same as in the homomorphic kernels: earlier pages as codes, its own page and the pages of the window
exactly. So results do not depend on where a prompt was cut. Queries and weights have 11 bits, where the homomorphic
kernels have 8.

Why: a page is dequantized once a pass and read by hundreds of tiles. On Hopper Triton's INT8 products of codes take six
times as long as cuDNN's BF16 products (docs/kernels-gpu.md). A program computes one tile, as in `prefill.py`: the query
heads of one KV head for a few consecutive tokens that lie in one page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq, current_target
from triton.tools.tensor_descriptor import TensorDescriptor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.limits import HELD_TOKENS
from hack_kernels.reference.reading import LARGEST_FP16, ReadingReference, heads_of
from hack_kernels.triton.code_tiles import padded
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.own_page import place_of
from hack_kernels.triton.prefill import locate, most_tiles, tile_arguments
from hack_kernels.triton.prefill_own import own_rows
from hack_kernels.triton.query import LOG2_E

ROWS: Final = 128
"""Query rows of a program: two groups of four warps with 64 each, as Hopper's matrix unit takes them."""
BLOCK: Final = 64
"""Rows of K and V that are multiplied at once."""
STAGES: Final = 3
"""Blocks on their way from memory, including the one that is multiplied. Three blocks of wide heads need 100 KiB of
shared memory, which sm_86 and sm_89 do not have."""
READ_PAGES: Final = 64
"""Pages that the definition dequantizes at once. It needs some 30 bytes of memory for each value."""
WIDE: Final = 128
"""Channels beyond which a program has half of the rows, because outputs fill the registers."""

LARGEST = tl.constexpr(LARGEST_FP16)
"""The largest FP16 number."""


@triton.constexpr_function
def copies_blocks() -> bool:
    """Whether the target has a unit that copies described blocks to shared memory (TMA), as Hopper has. For an older
    one Triton makes two-byte loads of a described block. The interpreter has no target, and reads described blocks."""
    return current_target() is None or cuda_capability_geq(9)


@triton.jit
def add_block(state, queries, keys, values, seen, factor, MASKED: tl.constexpr):
    """Keys and values FP16 [R, D] added to the running softmax, in units of log2; `seen` [M, R] counts with MASKED."""
    top, total, out = state
    scores = tl.dot(queries, tl.trans(keys))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1) * factor)
    weights, kept = tl.exp2(scores * factor - higher[:, None]), tl.exp2(top - higher)
    out = tl.dot(weights.to(tl.float16), values, out * kept[:, None])
    return higher, total * kept + tl.sum(weights, axis=1), out


@triton.jit(do_not_specialize_on_alignment=["batch"])
def dense_kernel(
    q,
    k,
    v,
    out,
    open_k,
    open_v,
    held_k,
    held_v,
    blocks_k,
    blocks_v,
    starts,
    counts,
    offsets,
    slots,
    batch,
    q_stride,
    row_stride,
    slot_stride,
    open_head_stride,
    most_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BATCH: tl.constexpr,
    D: tl.constexpr,
    PI: tl.constexpr,
    READ: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles, KV heads). Rows of a tile are (token, query head), heads padded to GROUP_PAD.

    held_k, held_v FP16 [batch, most_pages, HEADS, PI, D], contiguous. blocks_k, blocks_v describe them as [rows, D] in
    blocks of READ rows with zeros behind channel D; rows have numbers of 32 bits. The rest as in
    `prefill.prefill_kernel`.
    """
    M: tl.constexpr = TOKENS * GROUP_PAD
    CHANNELS: tl.constexpr = triton.next_power_of_2(D)
    sequence, first = locate(starts, counts, batch, BATCH, TOKENS)
    if sequence < 0:
        return
    head = tl.program_id(1)
    start = tl.load(starts + sequence).to(tl.int32)
    end = start + tl.load(counts + sequence).to(tl.int32)
    shift = tl.load(offsets + sequence) - start  # from positions to rows of the batch
    own_page = first // PI

    row, channel = tl.arange(0, M), tl.arange(0, CHANNELS)
    inside = (channel < D)[None, :]
    position, member = first + row // GROUP_PAD, row % GROUP_PAD
    seen_rows = (position >= start) & (position < end) & (member < GROUP)
    tile = (shift + first) * q_stride + head * (GROUP * D)
    at = (row // GROUP_PAD * q_stride + member * D)[:, None] + channel[None, :]
    queries = tl.load(q + tile + at, mask=seen_rows[:, None] & inside, other=0.0).to(tl.float32)
    queries = tl.minimum(tl.maximum(queries, -LARGEST), LARGEST).to(tl.float16)
    factor = LOG2_E * D**-0.5
    state = (tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, CHANNELS), tl.float32))

    coded = own_page
    if WINDOW.pages > 1:
        coded = tl.maximum(own_page - (WINDOW.pages - 1), 0)
    first_page = sequence * most_pages + WINDOW.sink
    read = tl.arange(0, READ)
    for begin in tl.range(0, coded * PI, READ, num_stages=STAGES):
        row_at = ((first_page + begin // PI) * HEADS + head) * PI + begin % PI
        if copies_blocks():
            keys, values = blocks_k.load([row_at, 0]), blocks_v.load([row_at, 0])
        else:
            block, within = row_at.to(tl.int64) * D, (read * D)[:, None] + channel[None, :]
            keys = tl.load(held_k + block + within, mask=inside, other=0.0)
            values = tl.load(held_v + block + within, mask=inside, other=0.0)
        state = add_block(state, queries, keys, values, seen_rows, factor, False)

    open_at = tl.load(slots + sequence) * slot_stride + head * open_head_stride
    if WINDOW.pages == 1:
        open_at -= (start // PI * PI).to(tl.int64) * D
    batch_at = shift * row_stride + head * D
    open_k, open_v, k, v = open_k + open_at, open_v + open_at, k + batch_at, v + batch_at
    last = tl.minimum(first + TOKENS, end)
    for place in tl.range(coded * PI, last, READ, num_stages=1):
        token = place + read
        early_k, early_v = open_k, open_v
        if WINDOW.pages > 1:
            # Sinks come first; the pages between them and the others were read as codes.
            page = place // PI
            page = tl.where(page < coded + tl.minimum(WINDOW.sink, own_page), page - coded, page)
            token = page * PI + place % PI + read
            moved = (place_of(page, WINDOW) - page) * (PI * D)
            early_k, early_v = open_k + moved, open_v + moved
        keys = own_rows(early_k, k, token, channel, start, end, row_stride, D)
        values = own_rows(early_v, v, token, channel, start, end, row_stride, D)
        state = add_block(state, queries, keys, values, token[None, :] <= position[:, None], factor, True)

    _, total, found = state
    x = (found / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + tile + at, x, mask=seen_rows[:, None] & inside)


Held = tuple[Tensor, Tensor]
"""K^ and V^ of pages, FP16 [P, Hkv, Π, D], contiguous."""


def attn_dense(pool: Pool, spans: Spans, rows: Rows, read: Callable[[Tensor], Held]) -> Tensor:
    """`PageKernels.attend` of a batch with rows k, v. `read` gives the pages of some ids [P] int64, dequantized. The
    host reads nothing.

    Pages are laid out by sequence. Read from a pool by number they took 1.4 times as long on an H200, because the copy
    of a page had to wait for its number.
    """
    assert rows.k is not None
    assert rows.v is not None
    q, k, v = rows.q.contiguous(), rows.k.contiguous(), rows.v.contiguous()
    out = torch.empty_like(q)
    batch, pages = spans.table.shape
    together = max(1, HELD_TOKENS // (pages * pool.page_tokens))
    for first in range(0, batch, together):
        part = Spans(*(getattr(spans, field.name)[first : first + together] for field in fields(Spans)))
        dense_launch(pool, part, Rows(q, k, v), read(part.table.flatten()), out).run()
    return out


def dense_launch(pool: Pool, spans: Spans, rows: Rows, held: Held, out: Tensor) -> Launch:
    """The launch that writes `out`; rows and `out` are contiguous."""
    q, k, v = rows.q, rows.k, rows.v
    assert k is not None
    assert v is not None
    heads, dim = k.shape[1:]
    group, pi = padded(q.shape[1] // heads), pool.page_tokens
    most = ROWS if dim <= WIDE else ROWS // 2
    tokens = min(pi, max(1, most // group))
    read = min(pi, BLOCK if dim <= WIDE else BLOCK // 2)
    blocks = [TensorDescriptor.from_tensor(x.view(-1, dim), [read, triton.next_power_of_2(dim)]) for x in held]
    arguments = {
        **tile_arguments(pool, spans, q, k, v, out, tokens),
        "held_k": held[0],
        "held_v": held[1],
        "blocks_k": blocks[0],
        "blocks_v": blocks[1],
        "most_pages": spans.table.shape[1],
        "HEADS": heads,
        "D": dim,
        "PI": pi,
        "READ": read,
        "STAGES": STAGES if dim <= WIDE else STAGES - 1,
    }
    warps = 8 if tokens * group >= ROWS or dim > WIDE else 4
    return Launch(dense_kernel, (most_tiles(q, spans, tokens), heads), arguments, warps)


@dataclass(frozen=True, slots=True)
class CodedSide:
    """K or V of pages in wire order, as `dequantize_kernel` takes them: x^ = scale·unit·(code - zero) + minimum."""

    codes: Tensor
    """uint8 [Hkv, P, Π·bits/8, D], or [Hkv, P, D, Π·bits/8] with `channels_first`. Codes of 3 or 5 bits have all but
    their highest bits here."""
    high: Tensor | None
    """The highest bits of codes of 3 or 5 bits, in the same order."""
    scale: Tensor
    """FP16 [Hkv, P, groups of tokens, groups of channels]."""
    minimum: Tensor | None
    """FP16, of the same shape."""
    bits: int
    """Bits of a code in `codes`."""
    zero: float = 0.0
    unit: float = 1.0
    channels_first: bool = False


@triton.jit
def code_of(codes, token, channel, BITS: tl.constexpr, FIRST: tl.constexpr, PI: tl.constexpr, D: tl.constexpr):
    """Codes INT32 of tokens and channels. A byte holds tokens of one channel; with FIRST a channel's bytes lie side by
    side."""
    FIELDS: tl.constexpr = 8 // BITS
    at = channel * (PI // FIELDS) + token // FIELDS if FIRST else token // FIELDS * D + channel
    return tl.load(codes + at, mask=channel < D, other=0).to(tl.int32) >> (token % FIELDS * BITS) & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["pages"])
def dequantize_kernel(
    codes,
    high,
    scale,
    minimum,
    out,
    pages,
    BITS: tl.constexpr,
    SPLIT: tl.constexpr,
    SHIFTED: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    PI: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (pages, KV heads): a page of K or V (`CodedSide`) to `out` FP16 [pages, KV heads, Π, D]. A page has scales
    for ALONG groups of tokens times ACROSS groups of channels."""
    page, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    wire = head * pages.to(tl.int64) + page
    token, channel = tl.arange(0, PI)[:, None], tl.arange(0, triton.next_power_of_2(D))[None, :]
    code = code_of(codes + wire * (PI * D * BITS // 8), token, channel, BITS, FIRST, PI, D)
    if SPLIT:
        code += code_of(high + wire * (PI * D // 8), token, channel, 1, FIRST, PI, D) << BITS
    at = (wire * ALONG + token // (PI // ALONG)) * ACROSS + channel // (D // ACROSS)
    x = (code.to(tl.float32) - ZERO) * tl.load(scale + at, mask=channel < D, other=0.0).to(tl.float32)
    if UNIT != 1.0:
        x *= UNIT
    if SHIFTED:
        x += tl.load(minimum + at, mask=channel < D, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16)
    tl.store(out + ((page * heads + head) * PI + token) * D + channel, x, mask=channel < D)


def page_rows(sides: tuple[CodedSide, CodedSide], page_tokens: int, head_dim: int) -> Held:
    """K^ and V^ of pages whose codes are `sides`."""
    found = []
    for side in sides:
        heads, pages = side.codes.shape[:2]
        out = torch.empty(pages, heads, page_tokens, head_dim, dtype=torch.float16, device=side.codes.device)
        arguments = {
            "codes": side.codes,
            "high": side.codes if side.high is None else side.high,
            "scale": side.scale,
            "minimum": side.scale if side.minimum is None else side.minimum,
            "out": out,
            "pages": pages,
            "BITS": side.bits,
            "SPLIT": side.high is not None,
            "SHIFTED": side.minimum is not None,
            "ZERO": side.zero,
            "UNIT": side.unit,
            "FIRST": side.channels_first,
            "ALONG": side.scale.shape[2],
            "ACROSS": side.scale.shape[3],
            "PI": page_tokens,
            "D": head_dim,
        }
        Launch(dequantize_kernel, (pages, heads), arguments, warps=4).run()
        found.append(out)
    return found[0], found[1]


def attn_dequantized(
    pool: Pool, spans: Spans, rows: Rows, sides: Callable[[Tensor], tuple[CodedSide, CodedSide]]
) -> Tensor:
    """`attn_dense` over pages of codes. `sides` gives the codes of some page ids [P] int64."""
    shape = pool.page_tokens, pool.open_k.shape[3]
    return attn_dense(pool, spans, rows, lambda ids: page_rows(sides(ids), *shape))


def attn_read(kernels: ReadingReference, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
    """`attn_dense` over pages that the definition dequantizes, in torch."""

    def side(name: str, ids: Tensor) -> Tensor:
        mine = {plane: x for plane, x in pool.planes.items() if plane.split("_")[0] == name}
        heads, dim = pool.num_kv_heads, pool.open_k.shape[3]
        found = torch.empty(len(ids), heads, pool.page_tokens, dim, dtype=torch.float16, device=ids.device)
        for some, there in zip(ids.split(READ_PAGES), found.split(READ_PAGES), strict=True):
            x = kernels.dequantize(name, {plane: x[some] for plane, x in mine.items()}, heads_of(pool))
            there.copy_(x.clamp(-LARGEST_FP16, LARGEST_FP16))
        return found

    return attn_dense(pool, spans, rows, lambda ids: (side("k", ids), side("v", ids)))


def hack_sides(wire: Planes, bits: tuple[int, int]) -> tuple[CodedSide, CodedSide]:
    """Codes with minima: scales of K by token and partition, of V by channel."""
    k = CodedSide(wire["k_codes"], None, wire["k_scale"], wire["k_min"], bits[0])
    v_scale, v_min = (wire[name].unsqueeze(2) for name in ("v_scale", "v_min"))
    return k, CodedSide(wire["v_codes"], None, v_scale, v_min, bits[1], channels_first=True)
