"""Every kernel against the reference on fresh random inputs. Its memory holds NaN or random bytes before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from hack_kernels.base import PageFormat, PageKernels, Pool, RowKernels, Rows, Spans
from hack_kernels.delta_format import DeltaFormat, DeltaSide
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.hack_format import HEAD_DIMS, PAGE_TOKENS, Arithmetic, HackFormat, OpenPage, Rounding
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.huffman_format import HuffmanFormat, HuffmanSide, Unit
from hack_kernels.level_format import LevelFormat
from hack_kernels.nuq_format import NuqFormat
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.row_format import RowFormat
from hack_kernels.rowwise import Rowwise
from hack_kernels.triton.backend import Prefill, TritonBackend
from hack_kernels.triton.rows import attn_decode_rows
from hack_kernels.triton.split import Workspace
from torch import Tensor

from bench.gpu.comparing import CPU, close, moved, poison, poisoned_pool, reconstructed, same, spans_on
from bench.gpu.dense_checks import check_dense
from bench.gpu.processes import Task
from bench.gpu.shapes import FORMAT, Format, definition_of, kernels_of, random_pages
from lab.gpu.dequantize import attn_decode_dequantized
from lab.gpu.presets import PRESETS

RIVAL_TOLERANCE = 2.0**-5
"""Relative error allowed for FP16 values and weights of 2-bit pages, for rows in BF16, and for outputs in BF16."""


LOOPS = ((2**17, 1), (2**15, 8))
"""(tokens, batch) for which the loop over pages is checked."""
REPEATS = 50
"""Number of runs that must be bit-equal: races between programs would make them differ."""


def checks(*, smoke: bool, seed: int) -> Iterator[Task]:
    """Checks of rotations, of the loop over pages at the timed sizes, of the presets of `rot-*`, and then of every
    size, form and open page. Code widths and groups alternate. `smoke`: one size, for the interpreter.

    The timed size comes first, then the sizes that take longest to compile. `seed` is for stochastic rounding.
    """
    yield Task("turns of heads", check_rotations)
    yield Task("rows between products", check_rows)
    presets = [LevelFormat(64 if smoke else 128, 32 if smoke else 64, *preset) for preset in PRESETS]
    looped: list[Format] = [FORMAT, *presets[2:3]]
    for fmt in looped:
        for tokens, batch in ((8 * fmt.page_tokens, 2),) if smoke else LOOPS:
            run = partial(check_loop, fmt, tokens, batch, 3 if smoke else REPEATS)
            yield Task(f"loop over pages {_name(fmt)} {tokens} x {batch}", run)
    for preset in presets[2:3] if smoke else presets:
        yield Task(f"prefill, decode {_name(preset)}", partial(check_attention, preset, 4))
        yield Task(f"dense {_name(preset)}", partial(check_dense, preset, 4))
        yield Task(f"seal, export, install {_name(preset)}", partial(check_pages, preset))
    for other in others(smoke=smoke):
        yield Task(f"dense {_name(other)}", partial(check_dense, other, 4))
        if not isinstance(other, RowFormat):  # `check_rivals` has these
            yield Task(f"prefill, decode {_name(other)}", partial(check_attention, other, 4))
    sizes = sorted(itertools.product(HEAD_DIMS, PAGE_TOKENS), key=lambda size: (size != (128, 64), -size[0]))
    kinds = itertools.cycle(itertools.product(((2, 2), (4, 2), (4, 4)), (4, 8, 1, 7, 3)))  # 15 kinds for 48 cases
    for (d, pi), arithmetic, open_page in itertools.product([(64, 32)] if smoke else sizes, Arithmetic, _open_pages()):
        (k_bits, v_bits), group = ((2, 2), 3) if smoke else next(kinds)
        fmt = HackFormat(d, pi, k_bits, v_bits, arithmetic=arithmetic, open_page=open_page)
        yield Task(f"prefill, decode {_name(fmt)} {open_page} G={group}", partial(check_attention, fmt, group))
        for rounding in (
            Rounding if smoke else [Rounding.STOCHASTIC if open_page is OpenPage.EXACT else Rounding.NEAREST]
        ):
            fmt = HackFormat(d, pi, k_bits, v_bits, rounding, arithmetic, seed=seed)
            if smoke and open_page is not OpenPage.EXACT:
                continue
            yield Task(f"seal, export, install {_name(fmt)} {rounding}", partial(check_pages, fmt))
        if open_page is OpenPage.EXACT:
            yield Task(f"dense {_name(fmt)} G={group}", partial(check_dense, fmt, group))
        if arithmetic is Arithmetic.SYMMETRIC and open_page is OpenPage.EXACT:
            yield Task(f"dequantize, rows {_name(fmt)} G={group}", partial(check_rivals, fmt, group))


def others(*, smoke: bool) -> list[PageFormat]:
    """Page formats whose own kernels do not multiply codes."""
    d, pi = (64, 32) if smoke else (128, 64)
    side, delta = partial(Grouping, 4, 32), DeltaSide(4, 7)
    return [
        RowFormat(d, pi),
        FloatFormat(d, page_tokens=pi),
        GroupFormat(d, side(by_channel=True), side(), pi),
        DeltaFormat(d, delta, delta, pi),
        NuqFormat(d, 4, 4, page_tokens=pi),
        HuffmanFormat(d, HuffmanSide(Unit.BLOCK, 0.05, 3.75), HuffmanSide(Unit.TOKEN, 0.15, 2.875), pi),
    ]


def check_rotations(backend: TritonBackend) -> None:
    """A rotated row must not depend on its place, bit for bit. Interpreted, a dot product is numpy's, whose order of
    sums may depend on the place. So the interpreter gets integers, whose sum is exact."""
    x, matrices = 3 * torch.randn(300, 6, 64), torch.randn(2, 64, 64)
    if backend.device.type == "cpu":
        x, matrices = x.round(), matrices.round()
    x, matrices = x.to(backend.device), matrices.to(backend.device)
    whole = backend.rows.rotate_heads(x, matrices)
    for start, size in [(0, 1), (299, 1), (5, 2), (2, 7), (7, 129)]:
        part = slice(start, start + size)
        if not torch.equal(backend.rows.rotate_heads(x[part], matrices), whole[part]):
            raise AssertionError("rotate_heads: a row differs by its place")


def check_rows(backend: TritonBackend) -> None:
    """A model's operations on BF16 rows against their definition, at the shapes of an 8B Llama. A row alone must have
    the bits that it has among others, and a row that FP16 cannot hold must stay out of its slot."""
    count, heads, kv_heads, dim, device = 5, 32, 8, 128, backend.device
    x, more, both, qkv = (
        torch.randn(count, n).bfloat16() for n in (4096, 4096, 2 * 14336, (heads + 2 * kv_heads) * dim)
    )
    weight, cos_sin, square = torch.randn(4096).bfloat16(), torch.randn(count, dim), torch.randn(kv_heads, dim, dim)
    qkv.view(count, -1, dim)[2, -1, 3] = torch.inf
    rotations = HeadRotations(square, square, torch.randn(kv_heads, dim))
    numbers, slots = torch.tensor([3, 64, 127, 0, 5]), torch.arange(count)

    def all_on(rows: RowKernels, device: torch.device, part: slice) -> list[Tensor]:
        """Results for the rows of `part`: 5 tensors that must have the definition's bits, then the other tensors."""
        summed, turned = (each[part].clone().to(device) for each in (x, qkv))
        normed = rows.norm(summed, weight.to(device), 1e-5, more[part].to(device))
        turned = turned.view(len(summed), -1, dim)
        rows.rotate(turned, heads + kv_heads, cos_sin[part].to(device))
        q, k, v = turned.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        pool = Pool({}, *torch.zeros(2, count, kv_heads, 64, dim, dtype=torch.float16, device=device))
        faulty = torch.zeros(len(summed), dtype=torch.bool, device=device)
        at, place = numbers[part], slots[part]
        rows.append(pool, spans_on(Spans(at, at, at, at[:, None], place), device), k, v, faulty)
        exact = [summed, turned, pool.open_k[part], pool.open_v[part], faulty]
        rotated = rows.rotate_rows(q, k, v, rotations.placed(device, rows.lay_out))
        return [each.cpu() for each in (*exact, normed, rows.gate(both[part].to(device)), *rotated)]

    whole, expected = (all_on(*on, slice(None)) for on in ((backend.rows, device), (Rowwise(), CPU)))
    names = ("sum", "rotate", "append k", "append v", "faulty", "norm", "gate", "rotate q", "rotate k", "rotate v")
    for index, (name, got, wanted) in enumerate(zip(names, whole, expected, strict=True)):
        if index < names.index("norm") and not torch.equal(got, wanted):
            raise AssertionError(f"{name}: not the definition's bits")
        held = torch.isfinite(wanted)
        if not torch.equal(torch.isfinite(got), held):
            raise AssertionError(f"{name}: other values are finite")
        close(got[held], wanted[held], name)
    for at in range(count):
        alone = all_on(backend.rows, device, slice(at, at + 1))
        for name, one, of_all in zip(names, alone, whole, strict=True):
            interpreted = device.type == "cpu" and name.startswith("rotate ")  # the dot product is numpy's
            if not interpreted and not torch.equal(one, of_all[at : at + 1]):
                raise AssertionError(f"{name}: a row differs by its place")


def check_pages(fmt: Format, backend: TritonBackend) -> None:
    """Bytes of sealed pages, before and after the wire."""
    shape = (3, 2, fmt.page_tokens, fmt.head_dim)
    k, v = (torch.randn(shape).half() for _ in range(2))
    ids, starts = torch.tensor([4, 0, 2]), torch.tensor([0, 7, 1000]) * fmt.page_tokens
    kernels, reference = kernels_of(backend, fmt), definition_of(fmt)
    expected = new_pool(fmt, reference, CPU, 5, 1, range(2))
    reference.seal(5, expected, ids, starts, k, v)
    wire = reference.export(expected, ids)
    pool = poisoned_pool(backend, fmt, 5, 2)
    on_device = [x.to(backend.device) for x in (ids, starts, k, v)]
    kernels.seal(5, pool, *on_device)
    same(kernels.export(pool, on_device[0]), wire, "seal or export")
    fresh = poisoned_pool(backend, fmt, 5, 2)
    kernels.install(fresh, on_device[0], {n: x.to(backend.device) for n, x in wire.items() if "sums" not in n})
    same(kernels.export(fresh, on_device[0]), wire, "install")


def check_loop(fmt: Format, tokens: int, batch: int, repeats: int, backend: TritonBackend) -> None:
    """Decode over so many pages that programs loop often, with few programs and with as many as a GPU holds. The result
    must be close to the definition's, and bit-equal between runs."""
    pi, heads, group, device = fmt.page_tokens, 2, 4, backend.device
    each = tokens // pi
    pages = random_pages(backend, each * batch, heads, fmt)
    starts = torch.arange(batch) % pi + each * pi
    order, table = torch.arange(batch), torch.randperm(each * batch).view(batch, each)
    spans = Spans(starts, torch.ones_like(starts), order, table, order)
    reference = definition_of(fmt)
    expected = new_pool(fmt, reference, CPU, each * batch, batch, range(heads))
    open_k, open_v = (rows.normal_().to(device) for rows in (expected.open_k, expected.open_v))
    pool = Pool(pages, open_k, open_v, 0, expected.window)
    ids = torch.arange(each * batch)
    reference.install(expected, ids, moved(kernels_of(backend, fmt).export(pool, ids.to(device)), CPU))
    q = torch.randn(batch, heads * group, fmt.head_dim).bfloat16()
    exact, there = reference.attend(0, expected, spans, Rows(q)), (spans_on(spans, device), Rows(q.to(device)))
    for workspace in (Workspace(device, 3), backend.workspace):
        kernels = _with_workspace(backend, fmt, workspace)
        first = kernels.attend(0, pool, *there)
        close(first, exact, "decode")
        for _ in range(repeats):
            if not torch.equal(kernels.attend(0, pool, *there), first):
                raise AssertionError("decode: two runs over the same pages differ")


def _with_workspace(backend: TritonBackend, fmt: Format, workspace: Workspace) -> PageKernels:
    other = TritonBackend(backend.device, backend.prefill)
    other.workspace = workspace
    return kernels_of(other, fmt)


def check_attention(fmt: PageFormat, group: int, backend: TritonBackend) -> None:
    """A ragged prefill around page boundaries, and a decode step over the same pages."""
    pi, heads = fmt.page_tokens, 2
    pairs = [(0, pi), (pi - 1, 2), (2 * pi + 3, pi + 1), (3 * pi, 1)]
    starts, counts = (torch.tensor(x) for x in zip(*pairs, strict=True))
    order = torch.arange(len(pairs))
    spans = Spans(starts, counts, counts.cumsum(0) - counts, torch.randperm(4 * len(pairs)).view(-1, 4), order)
    kernels = kernels_of(TritonBackend(backend.device, Prefill.HOMOMORPHIC), fmt)
    reference, total = definition_of(fmt), int(counts.sum())
    expected = new_pool(fmt, reference, CPU, 4 * len(pairs), len(pairs), range(heads))
    ids = torch.arange(4 * len(pairs))
    reference.seal(0, expected, ids, ids * pi, *(torch.randn(len(ids), heads, pi, fmt.head_dim).half() for _ in "kv"))
    pool = poisoned_pool(backend, fmt, len(ids), heads)
    kernels.install(pool, ids.to(backend.device), moved(reference.export(expected, ids), backend.device))
    for open_rows in (expected.open_k, expected.open_v):
        open_rows.normal_()
    pool = replace(pool, open_k=expected.open_k.to(backend.device), open_v=expected.open_v.to(backend.device))
    q = torch.randn(total, heads * group, fmt.head_dim).bfloat16()
    k, v = (torch.randn(total, heads, fmt.head_dim).half() for _ in "kv")
    their_q, *new = (x.to(backend.device) for x in (q, k, v))
    poison(q, backend.device)
    got = kernels.attend(0, pool, spans_on(spans, backend.device), Rows(their_q, *new))
    close(got, reference.attend(0, expected, spans, Rows(q, k, v)), "prefill")

    one, q = Spans(starts, torch.ones_like(counts), order, spans.table, order), q[: len(pairs)]
    poison(q, backend.device)
    got = kernels.attend(0, pool, spans_on(one, backend.device), Rows(their_q[: len(pairs)]))
    close(got, reference.attend(0, expected, one, Rows(q)), "decode")


def check_rivals(fmt: HackFormat, group: int, backend: TritonBackend) -> None:
    """The rivals of decode, over one ragged batch, against FP64 attention on the rows that they read."""
    pi, heads, device = fmt.page_tokens, 2, backend.device
    starts = torch.tensor([0, pi - 1, 2 * pi + 3, 3 * pi])
    order, count = torch.arange(len(starts)), 4 * len(starts)
    spans = Spans(starts, torch.ones_like(starts), order, torch.randperm(count).view(-1, 4), order)
    k, v = (torch.randn(count, heads, pi, fmt.head_dim).half() for _ in "kv")
    open_k, open_v = (torch.randn(len(starts), heads, pi, fmt.head_dim).half() for _ in "kv")
    q = torch.randn(len(starts), heads * group, fmt.head_dim).bfloat16()
    reference, ids = HackReference(fmt, CPU), torch.arange(count)
    sealed = new_pool(fmt, reference, CPU, count, 1, range(heads))
    reference.seal(0, sealed, ids, ids * pi, k, v)
    wire = reference.export(sealed, ids)
    pool = poisoned_pool(backend, fmt, count, heads)
    kernels_of(backend, fmt).install(pool, ids.to(device), moved(wire, device))
    own = (open_k.to(device), open_v.to(device))
    rest = (spans_on(spans, device), q.to(device), backend.workspace)
    poison(q, device)
    got = attn_decode_dequantized(fmt, Pool(pool.planes, *own), *rest)
    close(got, _exact(spans, q, open_k, open_v, *reconstructed(fmt, wire)), "dequantize", RIVAL_TOLERANCE)
    for dtype in (torch.bfloat16, torch.float16):
        k_rows, v_rows = k.to(dtype), v.to(dtype)
        poison(q, device)
        planes = {"k": k_rows.to(device), "v": v_rows.to(device)}
        got = attn_decode_rows(Pool(planes, *own), *rest)
        close(got, _exact(spans, q, open_k, open_v, k_rows, v_rows), f"rows in {dtype}", RIVAL_TOLERANCE)


def _exact(spans: Spans, q: Tensor, open_k: Tensor, open_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FP64 attention [B, Hq, D] over pages of rows k, v [P, Hkv, Π, D] and the open page of each sequence."""
    outs = []
    for b, cached in enumerate(spans.starts.tolist()):
        full, rest = divmod(cached, k.shape[2])
        ids, slot = spans.table[b, :full], spans.slots[b]
        keys, values = (
            torch.cat((pages[ids].transpose(0, 1).flatten(1, 2), own[slot, :, : rest + 1]), 1).double()
            for pages, own in ((k, open_k), (v, open_v))
        )
        queries = q[b].double().unflatten(0, (k.shape[1], -1))
        weights = (queries @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        outs.append((weights @ values).flatten(0, 1))
    return torch.stack(outs)


def _open_pages() -> tuple[OpenPage, ...]:
    return OpenPage.EXACT, OpenPage.K_CODES


def _name(fmt: PageFormat) -> str:
    if isinstance(fmt, LevelFormat):
        return f"levels D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits} {fmt.window}"
    if isinstance(fmt, HackFormat):
        return f"D={fmt.head_dim} Π={fmt.page_tokens} K{fmt.k_bits}V{fmt.v_bits} {fmt.arithmetic}"
    return f"{type(fmt).__name__} D={fmt.head_dim} Π={fmt.page_tokens}"
