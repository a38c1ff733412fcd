"""Launches of every kernel at the shapes that matter, on tensors without memory; `inspect.py` compiles them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import torch
from hack_kernels.base import Rows
from hack_kernels.float_format import FloatFormat
from hack_kernels.hack_format import (
    HEAD_DIMS,
    PAGE_TOKENS,
    Arithmetic,
    HackFormat,
    OpenPage,
    Rounding,
)
from hack_kernels.level_format import Feedback, LevelFormat, Scales
from hack_kernels.triton.code_tiles import CODE_BITS
from hack_kernels.triton.decode import decode_launch
from hack_kernels.triton.dense import dense_launch
from hack_kernels.triton.exchange import exchange_launch
from hack_kernels.triton.floats import WIDEST
from hack_kernels.triton.layout import new_pages
from hack_kernels.triton.level_decode import level_decode_launch
from hack_kernels.triton.level_exchange import level_exchange_launch
from hack_kernels.triton.level_prefill import level_prompt_reader
from hack_kernels.triton.level_seal import level_seal_launch
from hack_kernels.triton.prefill import prefill_launch, prompt_launch
from hack_kernels.triton.rows import rows_launch
from hack_kernels.triton.seal import seal_launch
from hack_kernels.triton.xxh3 import xxh3_launches
from hack_kernels.window import Window

from lab.gpu.dequantize import dequantize_launch
from lab.gpu.example import KV_HEADS, TOKENS, Example, empty, one_step, pool_of, sequences
from lab.gpu.presets import PRESETS
from lab.gpu.read_examples import CENTRED, FLOATS, GROUPS, LOOKUPS, NUMBERS, floats
from lab.gpu.row_examples import between_products, rotation


def decode(fmt: HackFormat, group: int, batch: int = 1) -> Example:
    """Sequences of 128K tokens, 8 KV heads, BF16 queries."""
    launch = decode_launch(fmt, pool_of(fmt, TOKENS), *one_step(fmt, group, batch))
    code_bytes = launch.warps * _code_bytes(fmt)
    more = f" batch {batch}" if batch > 1 else ""
    return Example(f"decode {_name(fmt)} G={group}{more}", launch, fmt.page_tokens, code_bytes, int8=True)


def dequantize(fmt: HackFormat, group: int) -> Example:
    """The rival `dequantize` on the same pages as `decode`."""
    launch = dequantize_launch(fmt, pool_of(fmt, TOKENS), *one_step(fmt, group))
    return Example(f"dequantize {_name(fmt)} G={group}", launch, fmt.page_tokens, launch.warps * _code_bytes(fmt))


def rows(fmt: HackFormat, group: int) -> Example:
    """Decode over pages of FP16 rows."""
    shape = (TOKENS // fmt.page_tokens, KV_HEADS, fmt.page_tokens, fmt.head_dim)
    planes = {name: empty(*shape, dtype=torch.float16) for name in "kv"}
    launch = rows_launch(replace(pool_of(fmt, 0), planes=planes), *one_step(fmt, group))
    name = f"rows D={fmt.head_dim} Π={fmt.page_tokens} G={group}"
    return Example(name, launch, launch.arguments["R"] // launch.warps)


def prefill(fmt: HackFormat, group: int) -> Example:
    """A prompt of 16K tokens, BF16 queries."""
    tokens = 2**14
    k, v = (empty(tokens, KV_HEADS, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    q = empty(tokens, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    spans = sequences(TOKENS // fmt.page_tokens)
    launch = prefill_launch(fmt, 0, pool_of(fmt, tokens), spans, q, k, v, torch.empty_like(q))
    return Example(f"prefill {_name(fmt)} G={group}", launch, 0, _code_bytes(fmt), int8=True)


def dense(head_dim: int, page_tokens: int, group: int) -> Example:
    """A prompt of 2,048 tokens with BF16 queries, which reads dequantized pages."""
    rows, pages = 2**11, 2**11 // page_tokens
    k, v = (empty(rows, KV_HEADS, head_dim, dtype=torch.float16) for _ in range(2))
    q = empty(rows, KV_HEADS * group, head_dim, dtype=torch.bfloat16)
    held = empty(pages, KV_HEADS, page_tokens, head_dim, dtype=torch.float16)
    pool = pool_of(LevelFormat(head_dim, page_tokens, window=Window(1, 2)), 0)
    launch = dense_launch(pool, sequences(pages), Rows(q, k, v), (held, held), torch.empty_like(q))
    return Example(f"dense D={head_dim} Π={page_tokens} G={group}", launch)


def seal(fmt: HackFormat) -> Example:
    """Pages of a prompt of 16K tokens."""
    tokens = 2**14
    count = tokens // fmt.page_tokens
    k, v = (empty(count, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    ids = empty(count, dtype=torch.int64)
    return Example(f"seal {_name(fmt)} {fmt.rounding}", seal_launch(fmt, 0, pool_of(fmt, tokens), ids, ids, k, v))


def exchange(fmt: HackFormat, *, installing: bool) -> Example:
    """Pages of a prompt of 16K tokens, to the wire, or (`installing`) from it. An install counts sums if the format has
    them."""
    count = 2**14 // fmt.page_tokens
    wire = {
        plane.name: empty(KV_HEADS, count, *plane.shape, dtype=plane.dtype)
        for plane in fmt.planes
        if not (installing and plane.derived)
    }
    pages = new_pages(fmt, count, KV_HEADS, "meta")
    launch = exchange_launch(fmt, pages, empty(count, dtype=torch.int64), wire, installing=installing)
    name = f"{'install' if installing else 'export'} {_name(fmt)}"
    return Example(name, launch, 0, launch.arguments["PAGES"] * _code_bytes(fmt))


def levels(fmt: LevelFormat, group: int) -> tuple[Example, ...]:
    """Every kernel for pages of levels; other shapes are as in `decode`, `prefill` and `seal`."""
    name, tokens, count = _name(fmt), 2**14, 2**14 // fmt.page_tokens
    ids, pool = empty(count, dtype=torch.int64), pool_of(fmt, TOKENS)
    decoding, together = (level_decode_launch(fmt, pool, *one_step(fmt, group, batch)) for batch in (1, 32))
    k, v = (empty(tokens, KV_HEADS, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    q = empty(tokens, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    spans = sequences(TOKENS // fmt.page_tokens)
    reader = level_prompt_reader(fmt, q.dtype)
    prompt = prompt_launch(reader, 0, pool, spans, q, k, v, torch.empty_like(q))
    page_k, page_v = (empty(count, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    square = empty(KV_HEADS, fmt.head_dim, fmt.head_dim, dtype=torch.float32)
    fed = Feedback(square, square[:, 0])
    seals = [level_seal_launch(fmt, pool, ids, page_k, page_v, feedback) for feedback in (None, fed)]
    wire = {p.name: empty(KV_HEADS, count, *p.shape, dtype=p.dtype) for p in fmt.planes}
    moves = [level_exchange_launch(fmt, pool.planes, ids, wire, installing=installing) for installing in (True, False)]
    code_bytes = _code_bytes(fmt)
    # Highest bits of V: 32 tokens of a channel are one word, so lanes move single words and pairs of words.
    narrow = (fmt.v_bits == 3) * fmt.page_tokens * fmt.head_dim // 8
    return (
        Example(f"decode {name} G={group}", decoding, fmt.page_tokens, decoding.warps * code_bytes, int8=True),
        Example(f"decode {name} G={group} batch 32", together, fmt.page_tokens, together.warps * code_bytes, int8=True),
        Example(f"prefill {name} G={group}", prompt, 0, code_bytes, int8=True),
        Example(f"seal {name}", seals[0]),
        Example(f"seal {name} feedback", seals[1]),
        Example(f"install {name}", moves[0], 0, moves[0].arguments["PAGES"] * (code_bytes - narrow)),
        Example(f"export {name}", moves[1], 0, moves[1].arguments["PAGES"] * (code_bytes - narrow)),
    )


def checksums() -> tuple[Example, ...]:
    """The kernels that check a received parcel of 8 MiB."""
    with torch.device("meta"):
        data = torch.empty(8 << 20, dtype=torch.uint8)
        keys, out = torch.empty(40, dtype=torch.int64), torch.empty(8, dtype=torch.int64)
        blocks, chain = xxh3_launches(data, keys, out)
    return Example("checksum XXH3 blocks", blocks), Example("checksum XXH3 chain", chain)


def _code_bytes(fmt: HackFormat | LevelFormat) -> int:
    """Bytes of the codes in a page of one KV head."""
    return fmt.page_tokens * fmt.head_dim * (fmt.k_bits + fmt.v_bits) // 8


def _name(fmt: HackFormat | LevelFormat) -> str:
    if isinstance(fmt, LevelFormat):
        window = f" window {fmt.window.sink}+{fmt.window.recent}" if fmt.window.pages > 1 else ""
        scales = "" if fmt.scales is Scales.FP16 else " FP8 scales"
        return f"levels D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits}{window}{scales}"
    form = "" if fmt.arithmetic is Arithmetic.SYMMETRIC else " asymmetric" if fmt.stored_sums else " no-sums"
    return f"D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits}{form}"


DECODE: Final = (
    *(decode(HackFormat(128, 64), group) for group in (8, 4, 1, 16)),
    decode(HackFormat(128, 64), 8, 32),
    *(decode(HackFormat(d, pi), 8) for d in (64, 96, 256) for pi in PAGE_TOKENS),
    *(decode(HackFormat(128, pi), 8) for pi in (32, 128)),
    decode(HackFormat(128, 64, k_bits=4), 8),
    decode(HackFormat(128, 64, k_bits=4, v_bits=4), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False), 8),
    decode(HackFormat(64, 64, arithmetic=Arithmetic.ASYMMETRIC), 8),
)
RIVALS: Final = (*(rival(HackFormat(d, 64), 8) for rival in (dequantize, rows) for d in (128, 64)),)
PREFILL: Final = (
    prefill(HackFormat(128, 64), 4),
    prefill(HackFormat(64, 32), 7),
    prefill(HackFormat(96, 128), 1),
    prefill(HackFormat(256, 128, k_bits=4, v_bits=4), 8),
    prefill(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, open_page=OpenPage.K_CODES), 4),
)
DENSE: Final = (dense(64, 64, 3), dense(128, 64, 4))
SEAL: Final = (
    seal(HackFormat(128, 64)),
    seal(HackFormat(64, 64)),
    seal(HackFormat(256, 128, k_bits=4, v_bits=4)),
    seal(HackFormat(128, 64, rounding=Rounding.STOCHASTIC, arithmetic=Arithmetic.ASYMMETRIC)),
)
EXCHANGE: Final = tuple(
    exchange(fmt, installing=installing)
    for fmt in (HackFormat(128, 64), HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC), HackFormat(64, 64))
    for installing in (True, False)
)

LEVELS: Final = (
    *(
        example
        for d, group in ((128, 4), (64, 3))
        for k_bits, v_bits, window in PRESETS
        for example in levels(LevelFormat(d, 64, k_bits, v_bits, window), group)
    ),
    *levels(LevelFormat(64, 64, 3, 2, scales=Scales.FP8), 3),
)
ROTATION: Final = (rotation(128, 4), rotation(64, 3))
BETWEEN_PRODUCTS: Final = between_products(1)
CHECKSUMS: Final = checksums()

KINDS: Final = (
    DECODE,
    RIVALS,
    FLOATS,
    GROUPS,
    CENTRED,
    LOOKUPS,
    PREFILL,
    DENSE,
    SEAL,
    EXCHANGE,
    LEVELS,
    ROTATION,
    BETWEEN_PRODUCTS,
    CHECKSUMS,
)
EXAMPLES: Final[tuple[Example, ...]] = tuple(itertools.chain(*KINDS))
"""The kernels that the tool prints by default; add a kernel's examples here."""


def grid(head_dim: int, page_tokens: int, bits: int) -> tuple[Example, ...]:
    """Every kernel that touches codes or makes them, at one size and width."""
    paper = HackFormat(head_dim, page_tokens, bits, bits, arithmetic=Arithmetic.ASYMMETRIC)
    fmt = HackFormat(head_dim, page_tokens, bits, bits)
    return (
        *(decode(form, 8) for form in (paper, fmt)),
        *(prefill(form, 4) for form in (paper, fmt)),
        dequantize(fmt, 8),
        *(exchange(form, installing=installing) for form in (paper, fmt) for installing in (True, False)),
        seal(fmt),
    )


GRID: Final = (
    *(rows(HackFormat(d, pi), 8) for d, pi in itertools.product(reversed(HEAD_DIMS), PAGE_TOKENS)),
    *(
        example
        for d, pi, (element, scaling) in itertools.product(reversed(HEAD_DIMS), PAGE_TOKENS, NUMBERS)
        if d <= WIDEST
        for example in floats(FloatFormat(d, element, scaling, pi), 8)
    ),
    *(
        example
        for d, pi, bits in itertools.product(reversed(HEAD_DIMS), PAGE_TOKENS, reversed(CODE_BITS))
        for example in grid(d, pi, bits)
    ),
)
"""Every kernel at every size, for `--grid`. Kernels that need most registers come first."""

CROWDED: Final = (decode(HackFormat(256, 128, 4, 4, arithmetic=Arithmetic.ASYMMETRIC), 8, 32), dense(256, 64, 4))
"""Kernels that are known to spill."""

NAMED: Final = {example.name: example for example in (*EXAMPLES, *GRID, *CROWDED)}
