"""Speed of the CPU kernels beside their rivals: `python -m bench.kernels [--json FILE]`.

Contenders of a row take turns, so that a noisy machine is noisy for all; times are medians, ratios are medians of the
ratios within a round. Every call finds its KV cache cold where the others' data exceed the last cache, as between the
layers of a model. Traffic counts codes, minima and scales of sealed pages.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep

import torch
from hack_kernels.base import HackFormat, HackPages, Rounding, Spans
from hack_kernels.cpu import CpuKernels, zeros_in_huge_pages
from hack_kernels.rivals import Rival, Rows, bf16_pages, read_all
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FORMAT = HackFormat(128, 64)
PI, D = FORMAT.page_tokens, FORMAT.head_dim
PAGE_BYTES = 5120  # of one KV head: codes, minima and scales of K and V
SETTLE_S = (
    0.01  # torch's OpenMP threads spin for some milliseconds after their work, on the cores of the next contender
)
SDPA_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ms` are medians by contender; `ratios` say how many times faster `hack` is."""

    what: str
    shape: str
    ms: dict[str, float]
    ratios: dict[str, float] = field(default_factory=dict)
    gb_per_s: float | None = None
    of_read_bandwidth: float | None = None


def race(contenders: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of each contender, and the median of every other one's time over that of `hack`."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            sleep(SETTLE_S)
            began = perf_counter()
            run()
            times[name].append((perf_counter() - began) * 1e3)
    ours = times.get("hack", [])
    ratios = {
        name: statistics.median(theirs / mine for theirs, mine in zip(rows, ours, strict=True))
        for name, rows in times.items()
        if name != "hack" and ours
    }
    return {name: statistics.median(rows) for name, rows in times.items()}, ratios


def read_bandwidth(threads: int) -> float:
    """GB/s of reading half a GiB, best of several."""
    words = torch.zeros(1 << 26, dtype=torch.int64).view(torch.uint64)
    best = float("inf")
    for _ in range(7):
        began = perf_counter()
        read_all(words, threads)
        best = min(best, perf_counter() - began)
    return words.numel() * 8 / best / 1e9


def decode_row(kernels: CpuKernels, tokens: int, batch: int, kv_heads: int, group: int, bandwidth: float) -> Row:
    """One step of decode over random codes; the rivals read caches of the same length."""
    pages_each = tokens // PI
    pages, rows = decode_inputs(kernels, pages_each, batch, kv_heads, group)
    bf16, dequantize = Rival("bf16", kernels.threads), Rival("dequantize", kernels.threads)
    bf16_pool = {
        name: zeros_in_huge_pages((batch * pages_each, kv_heads, PI, D), torch.bfloat16).normal_().view(torch.uint8)
        for name in ("k_codes", "v_codes")
    }
    contenders: dict[str, Callable[[], object]] = {
        "hack": lambda: kernels.attn_decode(FORMAT, 0, pages, rows.open_k, rows.open_v, rows.spans, rows.q),
        "bf16": lambda: bf16.attend(FORMAT, bf16_pool, rows),
        "dequantize": lambda: dequantize.attend(FORMAT, pages, rows),
    }
    sdpa_batch = 1 if batch * tokens > 2**18 else batch  # torch's time is proportional to the batch; memory is short
    for dtype in SDPA_DTYPES:
        contenders[f"sdpa {str(dtype)[6:]}"] = sdpa_decode(rows.q[:sdpa_batch], tokens, kv_heads, dtype)
    ms, ratios = race(contenders, rounds=9)
    scale = batch / sdpa_batch
    for name in [name for name in ms if name.startswith("sdpa")]:
        ms[name], ratios[name] = ms[name] * scale, ratios[name] * scale
    moved = batch * pages_each * kv_heads * PAGE_BYTES / (ms["hack"] * 1e6)
    shape = f"{tokens} tokens, {kv_heads}x{group} heads, batch {batch}"
    return Row("attn_decode", shape, ms, ratios, moved, moved / bandwidth)


def decode_inputs(
    kernels: CpuKernels, pages_each: int, batch: int, kv_heads: int, group: int
) -> tuple[HackPages, Rows]:
    pages = kernels.new_pages(FORMAT, pages_each * batch, kv_heads)
    for plane in pages.values():
        if plane.dtype is torch.uint8:
            plane.random_(0, 256)
        else:
            plane.copy_(torch.rand(plane.shape) * 0.1)
    order = torch.arange(batch)
    table = torch.randperm(pages_each * batch).view(batch, pages_each)
    starts, ones = torch.full((batch,), pages_each * PI), torch.ones(batch, dtype=torch.int64)
    open_k, open_v = (torch.randn(batch, kv_heads, PI, D).half() for _ in range(2))
    return pages, Rows(
        open_k, open_v, Spans(starts, ones, order, table, order), torch.randn(batch, kv_heads * group, D)
    )


def sdpa_decode(q: Tensor, tokens: int, kv_heads: int, dtype: torch.dtype) -> Callable[[], object]:
    """Contiguous K and V; the heads of a group are rows of one query, which is faster here than `enable_gqa`."""
    batch = q.shape[0]
    query = q.view(batch, kv_heads, -1, D).to(dtype)
    key, value = (torch.randn(batch, kv_heads, tokens, D, dtype=dtype) for _ in range(2))
    return lambda: scaled_dot_product_attention(query, key, value)


def prefill_row(kernels: CpuKernels, tokens: int, kv_heads: int, group: int) -> Row:
    """A whole prompt, causal."""
    k, v = (torch.randn(tokens, kv_heads, D).half() for _ in range(2))
    q = torch.randn(tokens, kv_heads * group, D)
    paged = [x.view(-1, PI, kv_heads, D).transpose(1, 2).contiguous() for x in (k, v)]
    ids, zero = torch.arange(tokens // PI), torch.tensor([0])
    pages = kernels.new_pages(FORMAT, tokens // PI, kv_heads)
    kernels.seal(FORMAT, 0, pages, ids, ids * PI, *paged)
    empty = torch.zeros(1, kv_heads, PI, D, dtype=torch.float16)
    spans = Spans(zero, torch.tensor([tokens]), zero, ids[None], zero)
    rows, bf16_pool, bf16 = Rows(empty, empty, spans, q, k, v), bf16_pages(*paged), Rival("bf16", kernels.threads)
    contenders: dict[str, Callable[[], object]] = {
        "hack": lambda: kernels.attn_prefill(FORMAT, 0, pages, empty, empty, spans, q, k, v),
        "bf16": lambda: bf16.attend(FORMAT, bf16_pool, rows),
    }
    for dtype in SDPA_DTYPES:
        contenders[f"sdpa {str(dtype)[6:]}"] = sdpa_prefill(q, k, v, dtype)
    ms, ratios = race(contenders, rounds=5)
    return Row("attn_prefill", f"{tokens} tokens, {kv_heads}x{group} heads, causal", ms, ratios)


def sdpa_prefill(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    group = q.shape[1] // k.shape[1]
    query = q.to(dtype).transpose(0, 1)[None].contiguous()
    key, value = (x.to(dtype).repeat_interleave(group, 1).transpose(0, 1)[None].contiguous() for x in (k, v))
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=True)


def page_rows(tokens: int, kv_heads: int) -> list[Row]:
    """Seal, install and export on one core; GB/s of FP16 rows for seal, of packed planes for the others."""
    kernels = CpuKernels(threads=1)
    paged = [torch.randn(tokens // PI, kv_heads, PI, D).half() for _ in range(2)]
    ids = torch.arange(tokens // PI)
    pages = kernels.new_pages(FORMAT, len(ids), kv_heads)
    stochastic = HackFormat(D, PI, rounding=Rounding.STOCHASTIC)
    wire = kernels.export(FORMAT, pages, ids)
    contenders: dict[str, Callable[[], object]] = {
        "seal, nearest": lambda: kernels.seal(FORMAT, 0, pages, ids, ids * PI, *paged),
        "seal, stochastic": lambda: kernels.seal(stochastic, 0, pages, ids, ids * PI, *paged),
        "install": lambda: kernels.install(FORMAT, pages, ids, wire),
        "export": lambda: kernels.export(FORMAT, pages, ids),
    }
    ms, _ = race(contenders, rounds=15)
    packed, rows = len(ids) * kv_heads * PAGE_BYTES, 4 * tokens * kv_heads * D
    return [
        Row(name, "per core", {"hack": t}, {}, (rows if name.startswith("seal") else packed) / (t * 1e6))
        for name, t in ms.items()
    ]


def call_row(kernels: CpuKernels) -> Row:
    """The fixed price of one call: one short sequence, one KV head."""
    pages, rows = decode_inputs(kernels, 1, 1, 1, 1)
    run = {"hack": lambda: kernels.attn_decode(FORMAT, 0, pages, rows.open_k, rows.open_v, rows.spans, rows.q)}
    ms, _ = race(dict(run), rounds=300)
    return Row("attn_decode call", "64 tokens, 1 head, batch 1", ms)


def machine(kernels: CpuKernels, bandwidth: float) -> dict[str, object]:
    """What the numbers belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "threads": kernels.threads,
        "isa": kernels.isa,
        "torch": torch.__version__,
        "read_gb_per_s": round(bandwidth, 1),
        "load_average": os.getloadavg()[0],
    }


def describe(row: Row) -> str:
    """One line of the table."""
    times = "  ".join(f"{name} {t:.3f}" for name, t in row.ms.items())
    ratios = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.ratios.items())
    traffic = "" if row.gb_per_s is None else f"{row.gb_per_s:.1f} GB/s"
    if row.of_read_bandwidth is not None:
        traffic += f" ({row.of_read_bandwidth:.0%} of read)"
    return (
        f"{row.what:17} {row.shape:38} | ms: {times}"
        + (f" | hack faster: {ratios}" if ratios else "")
        + f" | {traffic}"
    )


def main() -> None:
    """Run all rows, print them as they come, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write machine and rows here")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=["decode", "prefill", "pages"], help="one part of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = CpuKernels(threads=arguments.threads)
    bandwidth = read_bandwidth(arguments.threads)
    about = machine(kernels, bandwidth)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print(describe(row), flush=True)
        gc.collect()

    if arguments.only in (None, "pages"):
        for row in (*page_rows(4096, 2), call_row(kernels)):
            report(row)
    if arguments.only in (None, "prefill"):
        report(prefill_row(kernels, 8192, 2, 4))
    if arguments.only in (None, "decode"):
        for tokens, batch in ((16384, 1), (16384, 8), (65536, 1), (65536, 8)):
            report(decode_row(kernels, tokens, batch, 8, 4, bandwidth))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
