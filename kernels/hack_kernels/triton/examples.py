"""One launch of every kernel at the shapes that matter, on tensors without memory: what `inspect.py` compiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Arithmetic, HackFormat, Spans
from hack_kernels.triton.decode import decode_launch
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import new_pages
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


def decode(fmt: HackFormat, group: int) -> Example:
    """One sequence of 128K tokens, 8 KV heads, BF16 queries."""
    open_k, open_v = (_empty(1, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    q = _empty(1, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    pages = new_pages(fmt, TOKENS // fmt.page_tokens, KV_HEADS, "meta")
    spans = _one_sequence(TOKENS // fmt.page_tokens)
    workspace = Workspace(torch.device("meta"), PROGRAMS)
    launch = decode_launch(fmt, pages, open_k, open_v, spans, q, torch.empty_like(q), workspace)
    return Example(f"decode {_name(fmt)} G={group}", launch, fmt.page_tokens)


def _one_sequence(pages: int) -> Spans:
    scalar = _empty(1, dtype=torch.int64)
    return Spans(scalar, scalar, scalar, _empty(1, pages, dtype=torch.int64), scalar)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(fmt: HackFormat) -> str:
    form = "" if fmt.arithmetic is Arithmetic.SYMMETRIC else " asymmetric" if fmt.stored_sums else " no-sums"
    return f"D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits}{form}"


DECODE: Final = (
    *(decode(HackFormat(128, 64), group) for group in (8, 4, 1, 16)),
    *(
        decode(HackFormat(d, pi), 8)
        for d, pi in itertools.product((64, 96, 128, 256), (32, 64, 128))
        if (d, pi) != (128, 64)
    ),
    decode(HackFormat(128, 64, k_bits=4), 8),
    decode(HackFormat(128, 64, k_bits=4, v_bits=4), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC), 8),
    decode(HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False), 8),
)

EXAMPLES: Final[tuple[Example, ...]] = (*DECODE,)
"""Everything that the tool prints and the gates read; add a kernel's examples here."""
