"""The codecs' pages side by side: decode and prefill over them, and sealing with and without feedback.

`unfused` writes FP16 rows to memory before it attends to them, in every call, as HACK's paper timed its rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from hack_kernels.base import PageFormat, PageKernels, Pool, Rows, Spans
from hack_kernels.cpu import CpuBackend
from hack_kernels.delta_format import DeltaFormat, DeltaSide
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.hack_format import HackFormat, HackKernels
from hack_kernels.huffman_format import HuffmanFormat, HuffmanSide, Unit
from hack_kernels.level_format import Feedback, LevelFormat, LevelKernels
from hack_kernels.nuq_format import NuqFormat, NuqKernels, NuqTables, normal_poles
from hack_kernels.pools import new_pool
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.reference.floats import FloatReference
from hack_kernels.reference.groups import GroupReference
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.huffman import HuffmanReference
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.nuq import NuqReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from torch import Tensor

from bench.kernels_isas import random_feedback
from bench.race import Calls, copies, race
from bench.row import Row

D, PI, KV_HEADS, GROUP = 128, 64, 2, 4
LEVELS: Final = {"rot-k4v4": (4, 4), "rot-k3v3": (3, 3), "rot-k3v2": (3, 2), "rot-k2v2": (2, 2)}
"""Preset -> bits of K and of V."""
BY_TOKEN: Final = HuffmanSide(Unit.TOKEN, 0.15, 2.875)
FUSED: Final[dict[str, ReadFormat]] = {
    "fp8": FloatFormat(D, Element.E4M3, Scaling.PAGE, PI),
    "mxfp8": FloatFormat(D, Element.E4M3, Scaling.POWER, PI),
    "mxfp6": FloatFormat(D, Element.E2M3, Scaling.POWER, PI),
    "mxfp4": FloatFormat(D, Element.E2M1, Scaling.POWER, PI),
    "nvfp4": FloatFormat(D, Element.E2M1, Scaling.TWOFOLD, PI),
    "kivi-4": GroupFormat(D, Grouping(4, 32, by_channel=True), Grouping(4, 32), PI),
    "kivi-2": GroupFormat(D, Grouping(2, 32, by_channel=True), Grouping(2, 32), PI),
    "kvquant-4": NuqFormat(D, 4, 4, page_tokens=PI),
    "kvquant-2": NuqFormat(D, 2, 2, page_tokens=PI),
    "kvquant-2-calibrated": NuqFormat(D, 2, 2, calibrated=True, page_tokens=PI),
    "kvcomp": HuffmanFormat(D, HuffmanSide(Unit.BLOCK, 0.05, 3.75), BY_TOKEN, PI),
    "kvcomp-channel": HuffmanFormat(D, HuffmanSide(Unit.CHANNEL, 0.25, 2.375), BY_TOKEN, PI),
    "cachegen": GroupFormat(D, Grouping(4, D, centre=7), Grouping(4, D, centre=7), PI),
    "cachegen-eq86": GroupFormat(D, Grouping(4, D, centre=3), Grouping(4, D, centre=3), PI),
    "cachegen-delta": DeltaFormat(D, DeltaSide(4, 7), DeltaSide(4, 7), PI),
}
"""Formats of rivals whose values are read one by one. `cachegen` and `cachegen-delta` have that of most layers."""


def unfused(fmt: ReadFormat) -> ReadFormat:
    """The format with pages that become FP16 rows before attention."""
    assert isinstance(fmt, FloatFormat | GroupFormat | NuqFormat | HuffmanFormat | DeltaFormat)
    return replace(fmt, fused=False)


STRAW: Final = ("fp8", "mxfp4", "kivi-4", "kivi-2", "kvquant-4", "kvquant-2", "kvcomp", "cachegen", "cachegen-eq86")
READ: Final[dict[str, ReadFormat]] = {
    **FUSED,
    **{f"{name}-unfused": unfused(FUSED[name]) for name in STRAW},
}
"""The formats of `FUSED`, and some of them unfused, as HACK's paper timed its rivals."""
CPU = torch.device("cpu")
DEFINITIONS: Final[dict[type[ReadFormat], Callable[[Any, torch.device], PageKernels]]] = {
    DeltaFormat: DeltaReference,
    FloatFormat: FloatReference,
    GroupFormat: GroupReference,
    HuffmanFormat: HuffmanReference,
    NuqFormat: NuqReference,
}


def codecs(backend: CpuBackend, feedback: Feedback | None = None) -> dict[str, tuple[PageFormat, PageKernels]]:
    """Name -> format and kernels of `hack`, levels, exact rows and rivals. Levels have `feedback` in layer 0."""
    hack: Callable[[HackFormat, torch.device], HackKernels] = HackReference
    definition: Callable[[LevelFormat, torch.device], LevelKernels] = LevelReference
    found: dict[str, tuple[PageFormat, PageKernels]] = {}
    found["hack"] = HackFormat(D, PI), backend.kernels_for(HackFormat(D, PI), hack)
    for name, bits in LEVELS.items():
        fmt = LevelFormat(D, PI, *bits)
        levels = backend.kernels_for(fmt, definition)
        if feedback is not None:
            levels.set_feedback(0, feedback)
        found[name] = fmt, levels
    exact = RowFormat(D, PI)
    found["fp16"] = exact, backend.kernels_for(exact, RowReference)
    for name, of_rival in READ.items():
        kernels = backend.kernels_for(of_rival, read_definition)
        if isinstance(of_rival, NuqFormat) and of_rival.calibrated:
            cast(NuqKernels, kernels).calibrate(some_tables(of_rival))
        found[name] = of_rival, kernels
    return found


def some_tables(fmt: NuqFormat) -> NuqTables:
    """Tables for normal keys with the same range in all channels."""
    k_poles, v_poles = (torch.tensor(normal_poles(bits)) for bits in (fmt.k_bits, fmt.v_bits))
    reach = torch.full((KV_HEADS, fmt.head_dim), 2.5)
    frequencies = 10000.0 ** -torch.linspace(0, 1, fmt.head_dim // 2)
    return NuqTables(k_poles, v_poles, torch.stack((-reach, reach)), frequencies)


def read_definition(fmt: ReadFormat, device: torch.device) -> PageKernels:
    """The reference kernels of a rival's format, in torch."""
    return DEFINITIONS[type(fmt)](fmt, device)


def codec_rows(
    backend: CpuBackend, one_core: CpuBackend, tokens: tuple[int, int, int] = (16384, 8192, 4096)
) -> list[Row]:
    """Rows of decode, prefill and seals; `tokens` are (context of decode, prompt, tokens to seal on one core)."""
    decode, prefill, sealed = tokens
    return [decode_row(backend, decode), prefill_row(backend, prefill), *seal_rows(one_core, sealed)]


def decode_row(backend: CpuBackend, tokens: int) -> Row:
    """One decode step over sealed random rows; GB/s count sealed pages."""
    contenders: dict[str, Calls] = {}
    # k and v are made once: large tensors that come and go between lasting ones leave gigabytes of holes in the heap.
    k, v = (torch.randn(tokens // PI, KV_HEADS, PI, D).half() for _ in range(2))
    inputs = dict[str, list[tuple[Pool, Spans, Rows]]]()
    for name, (fmt, kernels) in codecs(backend).items():
        same_bytes = name.removesuffix("-unfused")
        if same_bytes not in inputs:
            count = copies(sealed_bytes(fmt, tokens))
            inputs[same_bytes] = [decode_inputs(kernels, fmt, k, v) for _ in range(count)]
        contenders[name] = [partial(kernels.attend, 0, *each) for each in inputs[same_bytes]]
    return compared("codecs, decode", backend, tokens, contenders, 7)


def prefill_row(backend: CpuBackend, tokens: int) -> Row:
    """A whole prompt, causal; GB/s count sealed pages, each once."""
    k, v = (torch.randn(tokens, KV_HEADS, D).half() for _ in range(2))
    q, zero, ids = torch.randn(tokens, KV_HEADS * GROUP, D), torch.tensor([0]), torch.arange(tokens // PI)
    paged = [x.view(-1, PI, KV_HEADS, D).transpose(1, 2).contiguous() for x in (k, v)]
    contenders: dict[str, Calls] = {}
    for name, (fmt, kernels) in codecs(backend).items():
        pool = new_pool(fmt, kernels, CPU, len(ids), 1, range(KV_HEADS))
        kernels.seal(0, pool, ids, ids * PI, *paged)
        spans = Spans(zero, torch.tensor([tokens]), zero, ids[None], zero)
        contenders[name] = [partial(kernels.attend, 0, pool, spans, Rows(q, k, v))]
    return compared("codecs, prefill", backend, tokens, contenders, 5)


def seal_rows(backend: CpuBackend, tokens: int) -> Iterator[Row]:
    """Two rows of seals, in GB/s of FP16 rows: without feedback, and with it for the codecs that have it."""
    paged = [torch.randn(tokens // PI, KV_HEADS, PI, D).half() for _ in range(2)]
    ids = torch.arange(tokens // PI)
    for fed in (False, True):
        contenders: dict[str, Calls] = {}
        for name, (fmt, kernels) in codecs(backend, random_feedback(KV_HEADS, D) if fed else None).items():
            if (fed and name not in LEVELS) or name.endswith("unfused"):
                continue
            pool = new_pool(fmt, kernels, CPU, len(ids), 1, range(KV_HEADS))
            contenders[name] = [partial(kernels.seal, 0, pool, ids, ids * PI, *paged)]
        ms, _ = race(contenders, rounds=15)
        speeds = {name: 4 * tokens * KV_HEADS * D / (t * 1e6) for name, t in ms.items()}
        yield Row(f"codecs, seal{', calibrated' if fed else ''}", f"{tokens} tokens, one core", ms, speeds=speeds)


def compared(what: str, backend: CpuBackend, tokens: int, contenders: dict[str, Calls], rounds: int) -> Row:
    """A row of attention: times, and GB/s of sealed pages."""
    ms, _ = race(contenders, rounds)
    speeds = {name: sealed_bytes(fmt, tokens) / (ms[name] * 1e6) for name, (fmt, _) in codecs(backend).items()}
    return Row(what, f"{tokens} tokens, {KV_HEADS}x{GROUP} heads", ms, speeds=speeds)


def sealed_bytes(fmt: PageFormat, tokens: int) -> int:
    """Bytes of sealed pages for `tokens` tokens, over all KV heads."""
    return tokens // PI * KV_HEADS * fmt.page_bytes


def decode_inputs(kernels: PageKernels, fmt: PageFormat, k: Tensor, v: Tensor) -> tuple[Pool, Spans, Rows]:
    """A sequence of the pages k, v [pages, Hkv, Π, D] in random order, and a query."""
    pages, zero = len(k), torch.tensor([0])
    pool = new_pool(fmt, kernels, CPU, pages, 1, range(KV_HEADS))
    kernels.seal(0, pool, torch.arange(pages), torch.arange(pages) * PI, k, v)
    for open_rows in (pool.open_k, pool.open_v):
        open_rows.normal_()
    spans = Spans(zero + pages * PI, zero + 1, zero, torch.randperm(pages)[None], zero)
    return pool, spans, Rows(torch.randn(1, KV_HEADS * GROUP, D))
