"""Attention of a whole prompt under every instruction set that this processor runs, beside torch's SDPA in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from hack_kernels.base import PageFormat, Rows, Spans
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.hack_format import HackFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import Window
from torch.nn.functional import scaled_dot_product_attention

from bench.race import Calls, race
from bench.row import Row

PI: Final = 64
SHAPES: Final = ((64, 3, 3), (128, 2, 4))
"""(head_dim, KV heads, query heads of each): those of SmolLM2-135M, and those of the other tables."""
CODECS: Final[dict[str, tuple[Callable[[int], PageFormat], Callable[..., Any]]]] = {
    "rot-k3v2": (lambda d: LevelFormat(d, PI, 3, 2, Window(1, 2)), LevelReference),
    "hack": (lambda d: HackFormat(d, PI), HackReference),
    "fp16": (lambda d: RowFormat(d, PI), RowReference),
}
WHAT: Final = "prompt, "
"""Prefix of the names of these rows; the codec follows."""


def isa_rows(tokens: int, threads: int) -> Iterator[Row]:
    """One row for each shape and codec, for a model in bfloat16. The rotation of codec `rot-k3v2` is not included."""
    zero, ids, cpu = torch.tensor([0]), torch.arange(tokens // PI), torch.device("cpu")
    spans = Spans(zero, zero + tokens, zero, ids[None], zero)
    for d, kv_heads, group in SHAPES:
        k, v = (torch.randn(tokens, kv_heads, d).bfloat16().half() for _ in range(2))
        q = torch.randn(tokens, kv_heads * group, d).bfloat16()
        paged = [x.view(-1, PI, kv_heads, d).transpose(1, 2).contiguous() for x in (k, v)]
        key, value = (x.bfloat16().repeat_interleave(group, 1).transpose(0, 1)[None].contiguous() for x in (k, v))
        sdpa = partial(scaled_dot_product_attention, q.transpose(0, 1)[None].contiguous(), key, value, is_causal=True)
        for name, (format_of, definition) in CODECS.items():
            contenders: dict[str, Calls] = {}
            for isa in supported_isas():
                fmt, backend = format_of(d), CpuBackend(isa, threads)
                kernels = backend.kernels_for(fmt, definition)
                pool = new_pool(fmt, kernels, cpu, len(ids), 1, range(kv_heads))
                kernels.seal(0, pool, ids, ids * PI, *paged)
                contenders[isa] = [partial(kernels.attend, 0, pool, spans, Rows(q, k, v))]
            contenders["SDPA"] = [sdpa]
            ms, _ = race(contenders, rounds=5)
            yield Row(WHAT + name, f"{tokens} tokens, {kv_heads}x{group} heads, head_dim {d}", ms)


def isa_table(rows: list[Row]) -> list[str]:
    """Lines of the table in Markdown."""
    if not rows:
        return []
    names = list(rows[0].ms)
    lines = [f"| prompt in bfloat16, ms | shape | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for row in rows:
        times = " | ".join(f"{row.ms[name]:.0f}" for name in names)
        lines.append(f"| {row.what.removeprefix(WHAT)} | {row.shape} | {times} |")
    return [*lines, ""]
