"""Named launches, and their parts: tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from hack_kernels.base import PageFormat, Pool, Spans
from hack_kernels.hack_format import (
    HackFormat,
)
from hack_kernels.level_format import LevelFormat
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import new_pages
from hack_kernels.triton.level_layout import new_level_pages
from hack_kernels.triton.split import Workspace
from torch import Tensor

KV_HEADS: Final = 8
TOKENS: Final = 2**17
PROGRAMS: Final = 3 * 132


@dataclass(frozen=True, slots=True)
class Example:
    """A launch with a name."""

    name: str
    launch: Launch
    tokens: int = 0
    """Tokens of one KV head that a warp handles in one iteration of the main loop; 0 if the kernel has none."""
    code_bytes: int = 0
    """Bytes of codes that a program reads in one iteration of the main loop, or in total if it has no main loop."""
    int8: bool = False
    """Whether the kernel multiplies codes as integers."""


def pool_of(fmt: HackFormat | LevelFormat, tokens: int) -> Pool:
    """A pool of one slot, with pages for `tokens` tokens."""
    shape = (1, KV_HEADS, fmt.window.pages * fmt.page_tokens, fmt.head_dim)
    open_k, open_v = (empty(*shape, dtype=torch.float16) for _ in range(2))
    size = (tokens // fmt.page_tokens, KV_HEADS, "meta")
    planes = new_pages(fmt, *size) if isinstance(fmt, HackFormat) else new_level_pages(fmt, *size)
    return Pool(planes, open_k, open_v, 0, fmt.window)


def one_step(fmt: PageFormat, group: int, batch: int = 1) -> tuple[Spans, Tensor, Tensor, Workspace]:
    """Spans, queries, room for outputs and a workspace."""
    q = empty(batch, KV_HEADS * group, fmt.head_dim, dtype=torch.bfloat16)
    spans = sequences(TOKENS // fmt.page_tokens, batch)
    return spans, q, torch.empty_like(q), Workspace(torch.device("meta"), PROGRAMS)


def sequences(pages: int, count: int = 1) -> Spans:
    each = empty(count, dtype=torch.int64)
    return Spans(each, each, each, empty(count, pages, dtype=torch.int64), each)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
