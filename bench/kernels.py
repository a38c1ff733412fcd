"""Speed of the CPU kernels beside their rivals: `python -m bench.kernels [--out docs]`.

Contenders of a row take turns, so that noise of the machine hits all of them. Times are medians; ratios are medians of
the ratios within a round. A turn walks over several KV caches, as a step walks over the layers of a model, so that
every call finds its cache in main memory. Traffic counts codes, minima and scales of sealed pages. HACKKV_CPU_ISA
chooses the instruction set; the report names rivals that lack it. The program asks for real-time priority, which needs
root; the report says whether it was granted.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.cpu import ISA_VARIABLE, CpuBackend
from hack_kernels.cpu.memory import zeroed_planes
from hack_kernels.hack_format import HackFormat, HackKernels, Rounding
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels_codecs import codec_rows
from bench.kernels_isas import isa_rows
from bench.kernels_limits import MachineLimits, measure_limits
from bench.kernels_report import console_line, write_report
from bench.race import Calls, copies, race
from bench.row import Row
from lab.rivals import RIVALS, available, bf16_pages

FORMAT = HackFormat(128, 64)
PI, D = FORMAT.page_tokens, FORMAT.head_dim
CPU = torch.device("cpu")
PAGE_BYTES = 5120  # of one KV head: codes, minima and scales of K and V
SDPA_DTYPES = (torch.float32, torch.bfloat16)


def own_backend(threads: int) -> CpuBackend:
    """Our CPU backend, with the instruction set that nodes would use."""
    return CpuBackend(os.environ.get(ISA_VARIABLE) or None, threads)


def missing_rivals(backend: CpuBackend) -> list[str]:
    """Rivals that cannot run on this processor or with the chosen instruction set."""
    return [name for name in RIVALS if name not in available(backend.threads, backend.isa)]


def decode_row(backend: CpuBackend, tokens: int, batch: int, kv_heads: int, group: int, limits: MachineLimits) -> Row:
    """One step of decode over random codes; the rivals read caches of the same length."""
    pages_each, size = tokens // PI, batch * tokens * kv_heads
    inputs = [
        decode_inputs(backend, pages_each, batch, kv_heads, group) for _ in range(copies(size * PAGE_BYTES // PI))
    ]
    pool, spans, rows = inputs[0]
    kernels, rivals = hack_kernels(backend, FORMAT), available(backend.threads, backend.isa)
    contenders: dict[str, Calls] = {
        "hack": [partial(kernels.attend, 0, *call) for call in inputs],
    }
    if bf16 := rivals.get("bf16"):
        pools = [bf16_pool(pool, batch * pages_each, kv_heads) for _ in range(copies(size * D * 4))]
        contenders["bf16"] = [partial(bf16.attend, FORMAT, each, spans, rows) for each in pools]
    if dequantize := rivals.get("dequantize"):
        contenders["dequantize"] = [partial(dequantize.attend, FORMAT, *call) for call in inputs]
    sdpa_batch = 1 if batch * tokens > 2**18 else batch  # saves memory; torch's time is proportional to the batch
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


def hack_kernels(backend: CpuBackend, fmt: HackFormat) -> HackKernels:
    definition: Callable[[HackFormat, torch.device], HackKernels] = HackReference
    return backend.kernels_for(fmt, definition)


def bf16_pool(pool: Pool, num_pages: int, kv_heads: int) -> Pool:
    """A copy of `pool` whose sealed pages are random rows in the form of the BF16 rival."""
    (planes,) = zeroed_planes([RowFormat(D, PI)], num_pages, kv_heads)
    for plane in planes.values():
        plane.view(torch.bfloat16).normal_()
    return replace(pool, planes=planes)


def decode_inputs(
    backend: CpuBackend, pages_each: int, batch: int, kv_heads: int, group: int
) -> tuple[Pool, Spans, Rows]:
    pool = new_pool(FORMAT, hack_kernels(backend, FORMAT), CPU, pages_each * batch, batch, range(kv_heads))
    for plane in pool.planes.values():
        if plane.dtype is torch.uint8:
            plane.random_(0, 256)
        else:
            plane.copy_(torch.rand(plane.shape) * 0.1)
    order = torch.arange(batch)
    table = torch.randperm(pages_each * batch).view(batch, pages_each)
    starts, ones = torch.full((batch,), pages_each * PI), torch.ones(batch, dtype=torch.int64)
    for open_rows in (pool.open_k, pool.open_v):
        open_rows.normal_()
    return pool, Spans(starts, ones, order, table, order), Rows(torch.randn(batch, kv_heads * group, D))


def sdpa_decode(q: Tensor, tokens: int, kv_heads: int, dtype: torch.dtype) -> dict[str, Calls]:
    """torch's SDPA over contiguous K and V, in two ways: a group of heads as rows of one query, and `enable_gqa`."""
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


def prefill_row(backend: CpuBackend, tokens: int, kv_heads: int, group: int) -> Row:
    """Attention of a whole prompt, causal."""
    k, v = (torch.randn(tokens, kv_heads, D).half() for _ in range(2))
    q = torch.randn(tokens, kv_heads * group, D)
    paged = [x.view(-1, PI, kv_heads, D).transpose(1, 2).contiguous() for x in (k, v)]
    ids, zero = torch.arange(tokens // PI), torch.tensor([0])
    kernels = hack_kernels(backend, FORMAT)
    pool = new_pool(FORMAT, kernels, CPU, tokens // PI, 1, range(kv_heads))
    kernels.seal(0, pool, ids, ids * PI, *paged)
    spans, rows = Spans(zero, torch.tensor([tokens]), zero, ids[None], zero), Rows(q, k, v)
    contenders: dict[str, Calls] = {
        "hack": [partial(kernels.attend, 0, pool, spans, rows)],
    }
    if bf16 := available(backend.threads, backend.isa).get("bf16"):
        bf16_pool = replace(pool, planes=bf16_pages(*paged))
        contenders["bf16"] = [partial(bf16.attend, FORMAT, bf16_pool, spans, rows)]
    for dtype in SDPA_DTYPES:
        contenders[f"sdpa {str(dtype).removeprefix('torch.')}"] = [sdpa_prefill(q, k, v, dtype)]
    ms, ratios = race(contenders, rounds=5)
    return Row("attn_prefill", f"{tokens} tokens, {kv_heads}x{group} heads, causal", ms, ratios)


def fp16_rows(backend: CpuBackend, tokens: int, kv_heads: int, group: int, dtype: torch.dtype) -> list[Row]:
    """The attention of codec `fp16` for a model of this dtype, by C++ and by torch."""
    fmt, count = RowFormat(D, PI), tokens // PI
    kernels, reference = backend.kernels_for(fmt, RowReference), RowReference(fmt, CPU)
    k, v = (torch.randn(tokens, kv_heads, D).bfloat16().half() for _ in range(2))
    q = torch.randn(tokens, kv_heads * group, D).to(dtype)
    pools = [new_pool(fmt, kernels, CPU, count, 1, range(kv_heads)) for _ in range(copies(4 * k.numel()))]
    for pool in pools:
        for name, x in (("k", k), ("v", v)):
            pool.planes[name][:] = x.view(-1, PI, kv_heads, D).transpose(1, 2)
    zero, table = torch.tensor([0]), torch.randperm(count)[None]
    prompt = (Spans(zero, zero + tokens, zero, table, zero), Rows(q, k, v))
    step = (Spans(zero + tokens, zero + 1, zero, table, zero), Rows(q[:1]))
    shape = f"{tokens} tokens, {kv_heads}x{group} heads, {str(dtype).removeprefix('torch.')} model"
    rows = []
    for what, arguments, chosen, rounds in (("prefill", prompt, pools[:1], 3), ("decode", step, pools, 7)):
        contenders: dict[str, Calls] = {
            "ours": [partial(kernels.attend, 0, pool, *arguments) for pool in chosen],
            "torch": [partial(reference.attend, 0, pool, *arguments) for pool in chosen[:2]],
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
    """Seal, install and export on one core. Seal counts GB/s of FP16 rows, the others GB/s of packed planes."""
    backend = own_backend(threads=1)
    kernels = hack_kernels(backend, FORMAT)
    stochastic = hack_kernels(backend, HackFormat(D, PI, rounding=Rounding.STOCHASTIC))
    paged = [torch.randn(tokens // PI, kv_heads, PI, D).half() for _ in range(2)]
    ids = torch.arange(tokens // PI)
    pool = new_pool(FORMAT, kernels, CPU, len(ids), 1, range(kv_heads))
    wire = kernels.export(pool, ids)
    contenders: dict[str, Calls] = {
        "seal, nearest": [lambda: kernels.seal(0, pool, ids, ids * PI, *paged)],
        "seal, stochastic": [lambda: stochastic.seal(0, pool, ids, ids * PI, *paged)],
        "install": [lambda: kernels.install(pool, ids, wire)],
        "export": [lambda: kernels.export(pool, ids)],
    }
    ms, _ = race(contenders, rounds=15)
    packed, rows = len(ids) * kv_heads * PAGE_BYTES, 4 * tokens * kv_heads * D
    return [
        Row(name, "per core", {"hack": t}, {}, (rows if name.startswith("seal") else packed) / (t * 1e6))
        for name, t in ms.items()
    ]


def call_row(backend: CpuBackend) -> Row:
    """The fixed cost of one call: one short sequence, one KV head."""
    call = partial(hack_kernels(backend, FORMAT).attend, 0, *decode_inputs(backend, 1, 1, 1, 1))
    ms, _ = race({"hack": [call] * 20}, rounds=50)
    return Row("attn_decode call", "64 tokens, 1 head, batch 1", ms)


def take_priority() -> bool:
    """Set real-time priority for this process and the threads that it will start; False if that is not allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    return True


def machine(backend: CpuBackend, limits: MachineLimits, priority: bool) -> dict[str, object]:
    """The machine on which the numbers were measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "threads": backend.threads,
        "isa": backend.isa,
        "torch": torch.__version__,
        "read_gb_per_s": round(limits.read_gb_per_s, 1),
        "integer_dots_g_per_s": round(limits.integer_dots),
        "of_one_thread": round(limits.one_core_dots),
        "load_average": round(os.getloadavg()[0], 1),
        "real_time_priority": priority,
        "missing_rivals": missing_rivals(backend),
    }


def main() -> None:
    """Run all rows, print them as they come, and write JSON if asked."""
    parser = argparse.ArgumentParser("python -m bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder whose performance.md, .json and .png get this section")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--only", choices=["decode", "prefill", "isas", "pages", "fp16", "codecs"], help="one part of the table"
    )
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    priority = take_priority()
    torch.set_num_threads(arguments.threads)
    backend = own_backend(arguments.threads)
    limits, missing = measure_limits(backend), missing_rivals(backend)
    about = machine(backend, limits, priority)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print(console_line(row, missing), flush=True)
        gc.collect()

    if arguments.only in (None, "pages"):
        for row in (*page_rows(4096, 2), call_row(backend)):
            report(row)
    if arguments.only in (None, "prefill"):
        report(prefill_row(backend, 8192, 2, 4))
    if arguments.only in (None, "isas"):
        for row in isa_rows(arguments.threads):
            report(row)
    if arguments.only in (None, "fp16"):
        for tokens in (2048, 8192):
            for dtype in (torch.float32, torch.bfloat16):
                for row in fp16_rows(backend, tokens, 2, 4, dtype):
                    report(row)
    if arguments.only in (None, "decode"):
        for tokens, batch in ((16384, 1), (16384, 8), (65536, 1), (65536, 8)):
            report(decode_row(backend, tokens, batch, 8, 4, limits))
    if arguments.only in (None, "codecs"):
        for row in codec_rows(backend, own_backend(threads=1)):
            report(row)
    if arguments.out:
        write_report(arguments.out, about, rows)


if __name__ == "__main__":
    main()
