"""One launch of every kernel at the shapes that matter, on tensors without memory: what `inspect.py` compiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import (
    CODE_BITS,
    HEAD_DIMS,
    PAGE_TOKENS,
    SUM_PLANES,
    Arithmetic,
    HackFormat,
    OpenPage,
    Rounding,
    Spans,
)
from hack_kernels.triton.decode import decode_launch
from hack_kernels.triton.dequantize import dequantize_launch
from hack_kernels.triton.exchange import exchange_launch
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import new_pages
from hack_kernels.triton.prefill import prefill_launch
from hack_kernels.triton.rows import ROWS_AT_ONCE, rows_launch
from hack_kernels.triton.seal import seal_launch
from hack_kernels.triton.split import Workspace

KV_HEADS: Final = 8
TOKENS: Final = 2**17
PROGRAMS: Final = 3 * 132


@dataclass(frozen=True, slots=True)
class Example:
    """A launch with a name."""

    name: str
    launch: Launch
    tokens: int = 0
    """Tokens of one KV head that a warp handles in one turn of the main loop; 0 where that means nothing."""
    code_bytes: int = 0
    """Bytes of codes that a program reads in one turn of the main loop, or in all where it has none."""
    int8: bool = False
    """It multiplies codes as integers."""


def decode(fmt: HackFormat, group: int) -> Example:
    """One sequence of 128K tokens, 8 KV heads, BF16 queries."""
    open_k, open_v, q, spans, workspace = _decode_inputs(fmt, group)
    pages = new_pages(fmt, TOKENS // fmt.page_tokens, KV_HEADS, "meta")
    launch = decode_launch(fmt, pages, open_k, open_v, spans, q, torch.empty_like(q), workspace)
    code_bytes = launch.warps * _code_bytes(fmt)
    return Example(f"decode {_name(fmt)} G={group}", launch, fmt.page_tokens, code_bytes, int8=True)


def dequantize(fmt: HackFormat, group: int) -> Example:
    """The rival on the same pages."""
    open_k, open_v, q, spans, workspace = _decode_inputs(fmt, group)
    pages = new_pages(fmt, TOKENS // fmt.page_tokens, KV_HEADS, "meta")
    launch = dequantize_launch(fmt, pages, open_k, open_v, spans, q, torch.empty_like(q), workspace)
    return Example(f"dequantize {_name(fmt)} G={group}", launch, fmt.page_tokens, launch.warps * _code_bytes(fmt))


def rows(fmt: HackFormat, group: int) -> Example:
    """Pages of FP16 rows."""
    open_k, open_v, q, spans, workspace = _decode_inputs(fmt, group)
    shape = (TOKENS // fmt.page_tokens, KV_HEADS, fmt.page_tokens, fmt.head_dim)
    k, v = (_empty(*shape, dtype=torch.float16) for _ in range(2))
    launch = rows_launch(k, v, open_k, open_v, spans, q, torch.empty_like(q), workspace)
    return Example(f"rows D={fmt.head_dim} Π={fmt.page_tokens} G={group}", launch, ROWS_AT_ONCE.value)


def prefill(fmt: HackFormat, group: int) -> Example:
    """A prompt of 16K tokens, BF16 queries."""
    open_k, open_v, _, spans, _ = _decode_inputs(fmt, group)
    tokens = 2**14
    k, v = (_empty(tokens, KV_HEADS, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    q = _empty(tokens, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    pages = new_pages(fmt, tokens // fmt.page_tokens, KV_HEADS, "meta")
    launch = prefill_launch(fmt, 0, pages, open_k, open_v, spans, q, k, v, torch.empty_like(q))
    return Example(f"prefill {_name(fmt)} G={group}", launch, 0, _code_bytes(fmt), int8=True)


def seal(fmt: HackFormat) -> Example:
    """Pages of a prompt of 16K tokens."""
    count = 2**14 // fmt.page_tokens
    k, v = (_empty(count, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    ids = _empty(count, dtype=torch.int64)
    launch = seal_launch(fmt, 0, new_pages(fmt, count, KV_HEADS, "meta"), ids, ids, k, v)
    return Example(f"seal {_name(fmt)} {fmt.rounding}", launch)


def exchange(fmt: HackFormat, *, installing: bool) -> Example:
    """Pages of a prompt of 16K tokens from the wire, with sums to count if the format has them, or to the wire."""
    count = 2**14 // fmt.page_tokens
    wire = {
        name: _empty(KV_HEADS, count, *shape, dtype=dtype)
        for name, (shape, dtype) in fmt.plane_specs().items()
        if not (installing and name in SUM_PLANES)
    }
    pages = new_pages(fmt, count, KV_HEADS, "meta")
    launch = exchange_launch(fmt, pages, _empty(count, dtype=torch.int64), wire, installing=installing)
    name = f"{'install' if installing else 'export'} {_name(fmt)}"
    return Example(name, launch, 0, launch.arguments["PAGES"] * _code_bytes(fmt))


def _decode_inputs(fmt: HackFormat, group: int) -> tuple[Tensor, Tensor, Tensor, Spans, Workspace]:
    open_k, open_v = (_empty(1, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    q = _empty(1, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    spans = _one_sequence(TOKENS // fmt.page_tokens)
    return open_k, open_v, q, spans, Workspace(torch.device("meta"), PROGRAMS)


def _one_sequence(pages: int) -> Spans:
    scalar = _empty(1, dtype=torch.int64)
    return Spans(scalar, scalar, scalar, _empty(1, pages, dtype=torch.int64), scalar)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _code_bytes(fmt: HackFormat) -> int:
    """Of a page of one KV head."""
    return fmt.page_tokens * fmt.head_dim * (fmt.k_bits + fmt.v_bits) // 8


def _name(fmt: HackFormat) -> str:
    form = "" if fmt.arithmetic is Arithmetic.SYMMETRIC else " asymmetric" if fmt.stored_sums else " no-sums"
    return f"D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits}{form}"


DECODE: Final = (
    *(decode(HackFormat(128, 64), group) for group in (8, 4, 1, 16)),
    *(decode(HackFormat(d, pi), 8) for d in (64, 96, 256) for pi in PAGE_TOKENS),
    *(decode(HackFormat(128, pi), 8) for pi in (32, 128)),
    decode(HackFormat(128, 64, k_bits=4), 8),
    decode(HackFormat(128, 64, k_bits=4, v_bits=4), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False), 8),
    decode(HackFormat(64, 64, arithmetic=Arithmetic.ASYMMETRIC), 8),
)
RIVALS: Final = tuple(rival(HackFormat(d, 64), 8) for rival in (dequantize, rows) for d in (128, 64))
PREFILL: Final = (
    prefill(HackFormat(128, 64), 4),
    prefill(HackFormat(64, 32), 7),
    prefill(HackFormat(96, 128), 1),
    prefill(HackFormat(256, 128, k_bits=4, v_bits=4), 8),
    prefill(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, open_page=OpenPage.K_CODES), 4),
)
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

EXAMPLES: Final[tuple[Example, ...]] = (*DECODE, *RIVALS, *PREFILL, *SEAL, *EXCHANGE)
"""What the tool prints unless told otherwise; add a kernel's examples here."""


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
        for d, pi, bits in itertools.product(reversed(HEAD_DIMS), PAGE_TOKENS, reversed(CODE_BITS))
        for example in grid(d, pi, bits)
    ),
)
"""Every kernel at every size, those first that need most registers: what `--grid` prints."""

NAMED: Final = {example.name: example for example in (*EXAMPLES, *GRID)}
