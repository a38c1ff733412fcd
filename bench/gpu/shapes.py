"""The rows that are timed. Each function returns one row: microseconds by contender, and values derived from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from hack_kernels.base import PageFormat, PageKernels, Planes, Pool, Rows, Spans
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat
from hack_kernels.hack_format import HackFormat
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.huffman_format import HuffmanFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.nuq_format import NuqFormat
from hack_kernels.pools import new_pool
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.reference.floats import FloatReference
from hack_kernels.reference.groups import GroupReference
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.huffman import HuffmanReference
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.nuq import NuqReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.triton.backend import Prefill, TritonBackend
from hack_kernels.triton.decode import decode_launch
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import page_layout
from hack_kernels.triton.level_decode import level_decode_launch
from hack_kernels.triton.level_layout import level_layout
from hack_kernels.triton.rows import rows_launch
from hack_kernels.window import Window
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.timing import measure
from lab.gpu.dequantize import dequantize_launch

FORMAT = HackFormat(128, 64)
PI, D = FORMAT.page_tokens, FORMAT.head_dim
LEVELS: Final = LevelFormat(D, PI, 3, 2, Window(1, 2))
"""The pages of `rot-k3v2`."""
SDPA = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    shape: str
    us: dict[str, float]
    faster_than_bf16: float | None = None
    gb_per_s: float | None = None
    """Bytes that the kernel must move, divided by its time."""
    target: str = ""
    tokens_per_s: float | None = None
    """Tokens a second of the first contender."""
    notes: list[str] = field(default_factory=list)


@triton.jit  # type: ignore[untyped-decorator]
def read_records(records, table, out, page_stride, head_stride, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The loads of decode and nothing else, for one page of one KV head."""
    page = tl.load(table + tl.program_id(0))
    at = (records + page * page_stride + tl.program_id(1) * head_stride).to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.arange(0, 512)
    total = tl.zeros((512,), tl.int32)
    for begin in tl.static_range(0, BYTES // 4, 512):
        total += tl.load(at + begin + word, mask=begin + word < BYTES // 4, other=0)
    tl.store(out + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(total, 0))


def decode_row(tokens: int, batch: int, kv_heads: int, group: int, backend: TritonBackend) -> Row:
    """One decode step over random codes. BF16 reads a cache of the same length, by torch and by our kernel `rows`."""
    device, each, workspace = backend.device, tokens // PI, backend.workspace
    pages = random_pages(backend, each * batch, kv_heads)
    order = torch.arange(batch, device=device)
    table = torch.randperm(each * batch, device=device).view(batch, each)
    starts, ones = torch.full_like(order, each * PI), torch.ones_like(order)
    spans = Spans(starts, ones, order, table, order)
    resident = Spans(starts, ones, order, order[:, None].expand(batch, each).contiguous(), order)
    open_k, open_v = (torch.randn(batch, kv_heads, PI, D, device=device).half() for _ in "kv")
    q = torch.randn(batch, kv_heads * group, D, device=device).bfloat16()
    out = torch.empty_like(q)
    pool = Pool(pages, open_k, open_v)
    codes = pages["k_codes"]
    read = Launch(
        read_records,
        (each * batch, kv_heads),
        {
            "records": codes,
            "table": table,
            "out": torch.empty(each * batch, kv_heads, dtype=torch.int32, device=device),
            "page_stride": codes.stride(0),
            "head_stride": codes.stride(1),
            "BYTES": page_layout(FORMAT).nbytes,
        },
        warps=4,
    )
    us = {
        "hack": measure(decode_launch(FORMAT, pool, spans, q, out, workspace).run, device),
        "loads only": measure(read.run, device),
        "compute only": measure(decode_launch(FORMAT, pool, resident, q, out, workspace).run, device, cold=False),
        "dequantize": measure(dequantize_launch(FORMAT, pool, spans, q, out, workspace).run, device),
    }
    rotated = new_pool(LEVELS, kernels_of(backend, LEVELS), device, each * batch, batch, range(kv_heads))
    randomize(rotated.planes | {"k": rotated.open_k, "v": rotated.open_v})
    us["rot-k3v2"] = measure(level_decode_launch(LEVELS, rotated, spans, q, out, workspace).run, device)
    del rotated
    query = q.view(batch, kv_heads, group, D)
    k, v = (torch.randn(batch, kv_heads, tokens, D, device=device, dtype=torch.bfloat16) for _ in "kv")
    best, notes = best_sdpa(
        {
            "group as rows": lambda: scaled_dot_product_attention(query, k, v),
            "enable_gqa": lambda: scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        },
        device,
    )
    us["bf16"] = best
    planes = {name: x.view(each * batch, kv_heads, PI, D) for name, x in (("k", k), ("v", v))}
    us["rows"] = measure(rows_launch(Pool(planes, open_k, open_v), spans, q, out, workspace).run, device)
    moved = each * batch * kv_heads * page_layout(FORMAT).nbytes
    targets = {(2**17, 1): "<= 40 us, >= 3.5x", (2**15, 8): ">= 4x"}
    target = targets.get((tokens, batch), ">= 1x" if tokens * batch > 8192 else "")
    shape = f"{tokens} tokens x {batch}, {kv_heads}x{group} heads"
    return Row("decode", shape, us, best / us["hack"], moved / us["hack"] / 1e3, target, notes=notes)


Format = HackFormat | LevelFormat
"""Formats of pages with codes."""


DEFINITIONS: Final[dict[type[PageFormat], Callable[..., PageKernels]]] = {
    DeltaFormat: DeltaReference,
    FloatFormat: FloatReference,
    GroupFormat: GroupReference,
    HackFormat: HackReference,
    HuffmanFormat: HuffmanReference,
    LevelFormat: LevelReference,
    NuqFormat: NuqReference,
    RowFormat: RowReference,
}


def definition_of(fmt: PageFormat) -> PageKernels:
    """The reference, on the processor, against which kernels for `fmt` are checked."""
    return DEFINITIONS[type(fmt)](fmt, torch.device("cpu"))


def kernels_of(backend: TritonBackend, fmt: PageFormat) -> PageKernels:
    """Triton's kernels for `fmt`."""
    kernels = backend.kernels_for(fmt, lambda fmt, _: definition_of(fmt))
    assert kernels.served_by == backend.name, f"no kernels for {fmt}"
    return kernels


def seal_row(tokens: int, kv_heads: int, fmt: HackFormat, backend: TritonBackend) -> Row:
    """Seal full pages; bytes are those of the FP16 input."""
    device, count = backend.device, tokens // PI
    k, v = (torch.randn(count, kv_heads, PI, D, device=device).half() for _ in "kv")
    ids = torch.arange(count, device=device)
    kernels = kernels_of(backend, fmt)
    pool = new_pool(fmt, kernels, device, count, 1, range(kv_heads))
    us = {"hack": measure(lambda: kernels.seal(0, pool, ids, ids * PI, k, v), device)}
    return Row(
        "seal",
        f"{tokens} tokens, {kv_heads} heads, {fmt.rounding}",
        us,
        None,
        2 * k.nbytes / us["hack"] / 1e3,
        ">= 1500 GB/s",
    )


def rotation_row(count: int, kv_heads: int, group: int, backend: TritonBackend) -> Row:
    """Rotate Q and K of a layer and round V to FP16, as `rot-*` do; bytes are those of rows in BF16 and in FP32."""
    device, heads = backend.device, (kv_heads * group, kv_heads, kv_heads)
    q, k, v = (torch.randn(count, each, D, device=device).bfloat16() for each in heads)
    rotations = HeadRotations(*(torch.randn(kv_heads, D, D, device=device) for _ in "qk"))
    us = measure(lambda: backend.rows.rotate_rows(q, k, v, rotations), device)
    moved = count * sum(heads) * D * (2 + 4)
    return Row("rotation", f"{count} rows, {kv_heads}x{group} heads", {"rot": us}, gb_per_s=moved / us / 1e3)


def prefill_row(tokens: int, kv_heads: int, group: int, backend: TritonBackend) -> Row:
    """A whole prompt, causal: on dequantized pages and on codes, against BF16."""
    device = backend.device
    k, v = (torch.randn(tokens, kv_heads, D, device=device).half() for _ in "kv")
    q = torch.randn(tokens, kv_heads * group, D, device=device).bfloat16()
    pages = random_pages(backend, tokens // PI, kv_heads)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.arange(tokens // PI, device=device)[None]
    spans = Spans(zero, zero + tokens, zero, table, zero)
    empty = torch.zeros(1, kv_heads, PI, D, dtype=torch.float16, device=device)
    pool, rows, us = Pool(pages, empty, empty), Rows(q, k, v), dict[str, float]()
    for how in (Prefill.DENSE, Prefill.HOMOMORPHIC):
        kernels = kernels_of(TritonBackend(device, how), FORMAT)
        us[how] = measure(partial(kernels.attend, 0, pool, spans, rows), device, rounds=5)
    query, key, value = (x.bfloat16().transpose(0, 1)[None].contiguous() for x in (q, k, v))
    best, notes = best_sdpa(
        {"enable_gqa": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)}, device
    )
    us["bf16"] = best
    shape = f"{tokens} tokens, {kv_heads}x{group} heads"
    return Row("prefill", shape, us, best / us[Prefill.DENSE], target=">= 0.95x", notes=notes)


def best_sdpa(variants: dict[str, Callable[[], Tensor]], device: torch.device) -> tuple[float, list[str]]:
    """Microseconds of torch's fastest attention, and its name. `MATH` is timed only if nothing else runs."""
    times: dict[str, float] = {}
    for (name, run), backend in ((pair, backend) for pair in variants.items() for backend in SDPA):
        if backend is SDPBackend.MATH and times:
            continue
        try:
            with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):  # torch warns why a backend refuses
                times[f"{backend.name.lower()}, {name}"] = measure(run, device, rounds=9)
        except RuntimeError:  # this backend does not take these shapes, or not on this GPU
            continue
    best = min(times, key=lambda name: times[name])
    return times[best], [f"bf16: {best}"]


def random_pages(backend: TritonBackend, count: int, kv_heads: int, fmt: Format = FORMAT) -> Planes:
    """Random codes under small random scales."""
    (pages,) = kernels_of(backend, fmt).new_planes([fmt], count, kv_heads)
    randomize(pages)
    return pages


def randomize(pages: Planes) -> None:
    """Fill planes of uint8 with random bytes, and others with small random numbers."""
    for plane in pages.values():
        if plane.dtype is torch.uint8:
            plane.random_(0, 256)
        else:
            plane.uniform_(0.0, 0.1)


def decode_bytes(tokens: int, batch: int, kv_heads: int) -> int:
    """Bytes of device memory that `decode_row` takes, BF16 rivals included."""
    records = 2 * page_layout(FORMAT).nbytes + level_layout(LEVELS).nbytes
    return tokens * batch * kv_heads * (4 * D + records // PI)
