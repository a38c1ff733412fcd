"""The default preset, `hack` and exact rows under every instruction set that this processor runs.

Prompts stand beside torch's SDPA in bfloat16. Decode is told in bytes that it reads, since codecs differ in them,
and sealing in bytes of FP16 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import torch
from hack_kernels.base import PageFormat, PageKernels, Pool, Rows, Spans
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.hack_format import HackFormat
from hack_kernels.level_format import Feedback, LevelFormat, LevelKernels, on_grid
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import OWN_PAGE_ONLY, Window
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.race import Calls, copies, race
from bench.row import Row

PI: Final = 64
SHAPES: Final = ((64, 3, 3), (128, 2, 4))
"""(head_dim, KV heads, query heads of each): those of SmolLM2-135M, and those of the other tables."""
CODECS: Final[dict[str, tuple[Callable[[int], PageFormat], Callable[..., Any]]]] = {
    "rot-k3v2": (lambda d: LevelFormat(d, PI, 3, 2, Window(1, 2)), LevelReference),
    "hack": (lambda d: HackFormat(d, PI), HackReference),
    "fp16": (lambda d: RowFormat(d, PI), RowReference),
}
UNITS: Final = (
    "Prompts in ms. Decode in GB/s of what it reads, pages of codes and exact ones; seals in GB/s of FP16 rows."
)
CPU: Final = torch.device("cpu")


def isa_rows(threads: int, prompt: int = 4096, decode: int = 16384, sealed: int = 4096) -> Iterator[Row]:
    """Rows of each shape, for a model in bfloat16: a prompt of so many tokens, decode after so many, and seals of so
    many on one core. The rotation of codec `rot-k3v2` is not included."""
    for shape in SHAPES:
        yield from prompt_rows(prompt, threads, *shape)
        yield from decode_rows(decode, threads, *shape)
        yield from seal_rows(sealed, *shape[:2])


def prompt_rows(tokens: int, threads: int, d: int, kv_heads: int, group: int) -> Iterator[Row]:
    """A row for each codec."""
    zero, ids = torch.tensor([0]), torch.arange(tokens // PI)
    spans = Spans(zero, zero + tokens, zero, ids[None], zero)
    k, v = (torch.randn(tokens, kv_heads, d).bfloat16().half() for _ in range(2))
    q = torch.randn(tokens, kv_heads * group, d).bfloat16()
    key, value = (x.bfloat16().repeat_interleave(group, 1).transpose(0, 1)[None].contiguous() for x in (k, v))
    sdpa = partial(scaled_dot_product_attention, q.transpose(0, 1)[None].contiguous(), key, value, is_causal=True)
    for name in CODECS:
        contenders: dict[str, Calls] = {}
        for isa in supported_isas():
            fmt, kernels = codec_on(CpuBackend(isa, threads), name, d)
            pool = sealed_pool(fmt, kernels, k, v)
            contenders[isa] = [partial(kernels.attend, 0, pool, spans, Rows(q, k, v))]
        contenders["SDPA"] = [sdpa]
        ms, _ = race(contenders, rounds=5)
        yield Row(f"prompt, {name}", f"{tokens} tokens, {kv_heads}x{group} heads, head_dim {d}", ms)


def decode_rows(tokens: int, threads: int, d: int, kv_heads: int, group: int) -> Iterator[Row]:
    """A row for each codec: one query row of every head, over as many sequences as the caches do not hold."""
    zero, ids = torch.tensor([0]), torch.arange(tokens // PI)
    spans = Spans(zero + tokens, zero + 1, zero, ids.flip(0)[None], zero)
    k, v = (torch.randn(tokens, kv_heads, d).half() for _ in range(2))
    query = Rows(torch.randn(1, kv_heads * group, d).bfloat16())
    for name in CODECS:
        contenders: dict[str, Calls] = {}
        for isa in supported_isas():
            fmt, kernels = codec_on(CpuBackend(isa, threads), name, d)
            read = kv_heads * read_bytes(fmt, len(ids))
            pools = [sealed_pool(fmt, kernels, k, v) for _ in range(copies(read))]
            contenders[isa] = [partial(kernels.attend, 0, pool, spans, query) for pool in pools]
        ms, _ = race(contenders, rounds=5)
        speeds = {isa: read / (t * 1e6) for isa, t in ms.items()}
        yield Row(f"decode, {name}", f"{tokens} tokens, {kv_heads}x{group} heads, head_dim {d}", ms, speeds=speeds)


def seal_rows(tokens: int, d: int, kv_heads: int) -> Iterator[Row]:
    """A row for each codec, and one for levels with feedback."""
    ids = torch.arange(tokens // PI)
    rows = [in_pages(torch.randn(tokens, kv_heads, d).half()) for _ in range(2)]
    fed: list[tuple[str, Feedback | None]] = [
        *((name, None) for name in CODECS),
        ("rot-k3v2", random_feedback(kv_heads, d)),
    ]
    for name, feedback in fed:
        what = name if feedback is None else f"{name}, calibrated"
        contenders: dict[str, Calls] = {}
        for isa in supported_isas():
            fmt, kernels = codec_on(CpuBackend(isa, threads=1), name, d)
            if feedback is not None:
                cast(LevelKernels, kernels).set_feedback(0, feedback)
            pool = new_pool(fmt, kernels, CPU, len(ids), 1, range(kv_heads))
            contenders[isa] = [partial(kernels.seal, 0, pool, ids, ids * PI, *rows)]
        ms, _ = race(contenders, rounds=9)
        speeds = {isa: 4 * tokens * kv_heads * d / (t * 1e6) for isa, t in ms.items()}
        yield Row(f"seal, {what}", f"{tokens} tokens, one core, {kv_heads} heads, head_dim {d}", ms, speeds=speeds)


def codec_on(backend: CpuBackend, name: str, d: int) -> tuple[PageFormat, PageKernels]:
    """The format of a codec's pages at head_dim d, and the backend's kernels for it."""
    format_of, definition = CODECS[name]
    return format_of(d), backend.kernels_for(format_of(d), definition)


def read_bytes(fmt: PageFormat, page: int) -> int:
    """Bytes that the first query of `page` reads of one KV head: pages of codes, and pages that it sees exactly."""
    window = fmt.window if isinstance(fmt, LevelFormat) else OWN_PAGE_ONLY
    exact = 4 * fmt.page_tokens * fmt.head_dim
    return len(window.coded(page)) * fmt.page_bytes + len(window.earlier(page)) * exact


def in_pages(x: Tensor) -> Tensor:
    """Rows [n, Hkv, D] as pages [n / Π, Hkv, Π, D]."""
    return x.view(-1, PI, *x.shape[1:]).transpose(1, 2).contiguous()


def sealed_pool(fmt: PageFormat, kernels: PageKernels, k: Tensor, v: Tensor) -> Pool:
    """A pool of the full pages of rows [n, Hkv, D]."""
    ids = torch.arange(len(k) // PI)
    pool = new_pool(fmt, kernels, CPU, len(ids), 1, range(k.shape[1]))
    kernels.seal(0, pool, ids, ids * PI, in_pages(k), in_pages(v))
    return pool


def random_feedback(kv_heads: int, d: int) -> Feedback:
    """Random feedback: its values do not change the time of a seal."""
    gains: Tensor = (torch.randn(kv_heads, d, d) / 8).triu(1)
    return Feedback(on_grid(gains), torch.rand(kv_heads, d) + 0.5)


def is_isa_row(row: Row) -> bool:
    """Whether the row's contenders are instruction sets."""
    return not row.ms.keys().isdisjoint(supported_isas())


def isa_table(rows: list[Row]) -> list[str]:
    """Lines of the table in Markdown."""
    if not rows:
        return []
    names = list(rows[0].ms)
    lines = [f"| each instruction set | shape | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for row in rows:
        lines.append(f"| {row.what} | {row.shape} | {' | '.join(cell(row, name) for name in names)} |")
    return [*lines, "", UNITS, ""]


def cell(row: Row, name: str) -> str:
    """GB/s and milliseconds, or whichever of them the row has of a contender."""
    if name not in row.ms:
        return ""
    return f"{row.speeds[name]:.2f} ({row.ms[name]:.2f} ms)" if row.speeds else f"{row.ms[name]:.0f} ms"
