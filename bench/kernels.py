"""Speed of the CPU kernels beside their rivals: `python -m bench.kernels [--out docs]`.

Contenders of a row take turns, so that a noisy machine is noisy for all; times are medians, ratios are medians of the
ratios within a round. A turn walks over several KV caches, as a step walks over the layers of a model, so that every
call finds its cache in main memory. Traffic counts codes, minima and scales of sealed pages. Asks for real-time
priority, which takes root; the report says whether it was granted.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import torch
from hack_kernels.base import HackFormat, HackPages, Rounding, Spans
from hack_kernels.cpu import CpuKernels, zeros_in_huge_pages
from hack_kernels.reference import ReferenceKernels
from hack_kernels.rivals import Rival, Rows, bf16_pages, read_all, run_dots
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels_report import write_report
from bench.row import Row

FORMAT = HackFormat(128, 64)
PI, D = FORMAT.page_tokens, FORMAT.head_dim
PAGE_BYTES = 5120  # of one KV head: codes, minima and scales of K and V
SETTLE_S = (
    0.01  # torch's OpenMP threads spin for some milliseconds after their work, on the cores of the next contender
)
SDPA_DTYPES = (torch.float32, torch.bfloat16)
DOT_ROUNDS = 1_000_000  # some milliseconds
COLD_BYTES = 128 * 2**20  # a turn's caches together: several times the last-level cache

Calls = Sequence[Callable[[], object]]
"""What one contender does in a turn: the same call over one KV cache after another."""


def race(contenders: dict[str, Calls], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of a call of each contender, and the median of every other one's time over that of `hack`."""
    for calls in contenders.values():
        calls[0]()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, calls in contenders.items():
            sleep(SETTLE_S)
            calls[-1]()  # after the pause: code, tables and threads are awake, the first cache is cold
            began = perf_counter()
            for call in calls:
                call()
            times[name].append((perf_counter() - began) * 1e3 / len(calls))
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


def integer_dots(isa: str, threads: int) -> float:
    """10^9 products of two bytes a second, best of several."""
    run_dots(isa, 1000, threads)
    best = 0.0
    for _ in range(15):
        began = perf_counter()
        products = run_dots(isa, DOT_ROUNDS, threads)
        best = max(best, products / (perf_counter() - began) / 1e9)
    return best


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do at best, on the threads of the kernels."""

    read_gb_per_s: float
    integer_dots: float
    """10^9 products a second on all threads."""
    one_core_dots: float
    """On one thread."""


def measure_limits(kernels: CpuKernels) -> Limits:
    """Memory and vector units, each by the barest loop that uses it."""
    dots = (integer_dots(kernels.isa, threads) for threads in (kernels.threads, 1))
    return Limits(read_bandwidth(kernels.threads), *dots)


def decode_row(kernels: CpuKernels, tokens: int, batch: int, kv_heads: int, group: int, limits: Limits) -> Row:
    """One step of decode over random codes; the rivals read caches of the same length."""
    pages_each, size = tokens // PI, batch * tokens * kv_heads
    inputs = [
        decode_inputs(kernels, pages_each, batch, kv_heads, group) for _ in range(copies(size * PAGE_BYTES // PI))
    ]
    rows = inputs[0][1]
    bf16, dequantize = Rival("bf16", kernels.threads), Rival("dequantize", kernels.threads)
    bf16_pools = [bf16_pool(batch * pages_each, kv_heads) for _ in range(copies(size * D * 4))]
    contenders: dict[str, Calls] = {
        "hack": [
            partial(kernels.attn_decode, FORMAT, 0, pages, x.open_k, x.open_v, x.spans, x.q) for pages, x in inputs
        ],
        "bf16": [partial(bf16.attend, FORMAT, pool, rows) for pool in bf16_pools],
        "dequantize": [partial(dequantize.attend, FORMAT, pages, x) for pages, x in inputs],
    }
    sdpa_batch = 1 if batch * tokens > 2**18 else batch  # torch's time is proportional to the batch; memory is short
    for dtype in SDPA_DTYPES:
        contenders.update(sdpa_decode(rows.q[:sdpa_batch], tokens, kv_heads, dtype))
    ms, ratios = race(contenders, rounds=7)
    scale = batch / sdpa_batch
    for name in [name for name in ms if name.startswith("sdpa")]:
        ms[name], ratios[name] = ms[name] * scale, ratios[name] * scale
    moved = batch * pages_each * kv_heads * PAGE_BYTES / (ms["hack"] * 1e6)
    shape = f"{tokens} tokens, {kv_heads}x{group} heads, batch {batch}"
    products = 2 * batch * tokens * kv_heads * group * D / (ms["hack"] * 1e6)
    return Row("attn_decode", shape, ms, ratios, moved, moved / limits.read_gb_per_s, products / limits.integer_dots)


def bf16_pool(num_pages: int, kv_heads: int) -> HackPages:
    """Random rows where the BF16 rival looks for codes."""
    shape = (num_pages, kv_heads, PI, D)
    planes = zeros_in_huge_pages(dict.fromkeys(("k_codes", "v_codes"), (shape, torch.bfloat16)))
    return {name: plane.normal_().view(torch.uint8) for name, plane in planes.items()}


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


def copies(num_bytes: int) -> int:
    """How many KV caches of this size a turn walks over."""
    return -(-COLD_BYTES // num_bytes)


def sdpa_decode(q: Tensor, tokens: int, kv_heads: int, dtype: torch.dtype) -> dict[str, Calls]:
    """Contiguous K and V, in two ways: a group of heads as rows of one query, and the usual `enable_gqa`."""
    batch, name = q.shape[0], str(dtype).removeprefix("torch.")
    as_rows, as_heads = q.view(batch, kv_heads, -1, D).to(dtype), q.view(batch, -1, 1, D).to(dtype)
    caches = [
        [torch.randn(batch, kv_heads, tokens, D, dtype=dtype) for _ in range(2)]
        for _ in range(copies(batch * kv_heads * tokens * D * 2 * dtype.itemsize))
    ]
    return {
        f"sdpa {name}, rows": [partial(scaled_dot_product_attention, as_rows, k, v) for k, v in caches],
        f"sdpa {name}, gqa": [
            partial(scaled_dot_product_attention, as_heads, k, v, enable_gqa=True) for k, v in caches
        ],
    }


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
    contenders: dict[str, Calls] = {
        "hack": [partial(kernels.attn_prefill, FORMAT, 0, pages, empty, empty, spans, q, k, v)],
        "bf16": [partial(bf16.attend, FORMAT, bf16_pool, rows)],
    }
    for dtype in SDPA_DTYPES:
        contenders[f"sdpa {str(dtype).removeprefix('torch.')}"] = [sdpa_prefill(q, k, v, dtype)]
    ms, ratios = race(contenders, rounds=5)
    return Row("attn_prefill", f"{tokens} tokens, {kv_heads}x{group} heads, causal", ms, ratios)


def fp16_rows(kernels: CpuKernels, tokens: int, kv_heads: int, group: int, dtype: torch.dtype) -> list[Row]:
    """What codec `fp16` computes, for a model of that dtype: its attention by C++ and by torch."""
    reference, count = ReferenceKernels(), tokens // PI
    k, v = (torch.randn(tokens, kv_heads, D).bfloat16().half() for _ in range(2))
    q = torch.randn(tokens, kv_heads * group, D).to(dtype)
    pools = [kernels.new_rows(count, kv_heads, PI, D) for _ in range(copies(4 * k.numel()))]
    for pool in pools:
        pool["k"][:], pool["v"][:] = (x.view(-1, PI, kv_heads, D).transpose(1, 2) for x in (k, v))
    zero, table = torch.tensor([0]), torch.randperm(count)[None]
    empty = torch.zeros(1, kv_heads, PI, D, dtype=torch.float16)
    prompt = (empty, empty, Spans(zero, zero + tokens, zero, table, zero), q, k, v)
    step = (empty, empty, Spans(zero + tokens, zero + 1, zero, table, zero), q[:1])
    shape = f"{tokens} tokens, {kv_heads}x{group} heads, {str(dtype).removeprefix('torch.')} model"
    rows = []
    for what, arguments, chosen, rounds in (("prefill", prompt, pools[:1], 3), ("decode", step, pools, 7)):
        contenders: dict[str, Calls] = {
            "ours": [partial(kernels.attn_rows, pool, *arguments) for pool in chosen],
            "torch": [partial(reference.attn_rows, pool, *arguments) for pool in chosen[:2]],
        }
        ms, _ = race(contenders, rounds)
        rows.append(Row(f"codec fp16, {what}", shape, ms))
    return rows


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
    contenders: dict[str, Calls] = {
        "seal, nearest": [lambda: kernels.seal(FORMAT, 0, pages, ids, ids * PI, *paged)],
        "seal, stochastic": [lambda: kernels.seal(stochastic, 0, pages, ids, ids * PI, *paged)],
        "install": [lambda: kernels.install(FORMAT, pages, ids, wire)],
        "export": [lambda: kernels.export(FORMAT, pages, ids)],
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
    call = partial(kernels.attn_decode, FORMAT, 0, pages, rows.open_k, rows.open_v, rows.spans, rows.q)
    ms, _ = race({"hack": [call] * 20}, rounds=50)
    return Row("attn_decode call", "64 tokens, 1 head, batch 1", ms)


def take_priority() -> bool:
    """Real-time priority for this process and the threads that it will start; False where it is not allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    return True


def machine(kernels: CpuKernels, limits: Limits, priority: bool) -> dict[str, object]:
    """What the numbers belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "threads": kernels.threads,
        "isa": kernels.isa,
        "torch": torch.__version__,
        "read_gb_per_s": round(limits.read_gb_per_s, 1),
        "integer_dots_g_per_s": round(limits.integer_dots),
        "of_one_thread": round(limits.one_core_dots),
        "load_average": round(os.getloadavg()[0], 1),
        "real_time_priority": priority,
    }


def describe(row: Row) -> str:
    """One line of the table."""
    times = "  ".join(f"{name} {t:.3f}" for name, t in row.ms.items())
    ratios = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.ratios.items())
    traffic = "" if row.gb_per_s is None else f"{row.gb_per_s:.1f} GB/s"
    if row.of_read_bandwidth is not None:
        traffic += f" ({row.of_read_bandwidth:.0%} of read)"
    if row.of_integer_dots is not None:
        traffic += f", {row.of_integer_dots:.0%} of integer dots"
    return (
        f"{row.what:17} {row.shape:38} | ms: {times}"
        + (f" | hack faster: {ratios}" if ratios else "")
        + f" | {traffic}"
    )


def main() -> None:
    """Run all rows, print them as they come, and write JSON if asked."""
    parser = argparse.ArgumentParser("python -m bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder whose performance.md, .json and .png get this section")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=["decode", "prefill", "pages", "fp16"], help="one part of the table")
    arguments = parser.parse_args()
    priority = take_priority()
    torch.set_num_threads(arguments.threads)
    kernels = CpuKernels(threads=arguments.threads)
    limits = measure_limits(kernels)
    about = machine(kernels, limits, priority)
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
    if arguments.only in (None, "fp16"):
        for tokens in (2048, 8192):
            for dtype in (torch.float32, torch.bfloat16):
                for row in fp16_rows(kernels, tokens, 2, 4, dtype):
                    report(row)
    if arguments.only in (None, "decode"):
        for tokens, batch in ((16384, 1), (16384, 8), (65536, 1), (65536, 8)):
            report(decode_row(kernels, tokens, batch, 8, 4, limits))
    if arguments.out:
        write_report(arguments.out, about, rows)


if __name__ == "__main__":
    main()
