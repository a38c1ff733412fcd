"""One launch for a ragged batch: how its pages are divided among programs, and how partial results are merged.

Work is counted in units: one for every sealed page, and for a sequence's own page as many as it costs. The units of a
batch form one row, sequence after sequence. Each of the `parts` programs of a KV head takes an equal stretch of the
row. Lengths are read on the device, so the grid does not depend on them, and a CUDA graph replays for any lengths.

A sequence may lie in several stretches. Each program then writes its share (outputs, weight and largest score) to
`partials` and draws a ticket. The program with the last ticket adds up all shares, in the order of the stretches, and
resets the ticket to 0. Results do not depend on which program that is.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_PROCESSOR: Final = 3
"""Decode programs that a multiprocessor holds at a time, as far as their registers let it (`paged.py`)."""
OWN_UNITS = tl.constexpr(8)
"""Cost of a sequence's own page in pages of codes: it has 6.4 times their bytes and other costs once per sequence."""
LEAST_SHARED: Final = 100 << 10
"""Bytes of shared memory assumed for a multiprocessor where there is no GPU: the least that `support.py` admits."""
SYSTEM_SHARED: Final = 1 << 10
"""Bytes of shared memory that the system takes for each program."""
LARGE_BATCH: Final = 256
"""Sequences up to which batches share one compiled kernel. Their lengths take two registers of a lane."""


def batch_block(batch: int) -> int:
    """`BATCH` of kernels that look at all sequences at once, a power of two. Triton takes seconds to compile a kernel,
    so batches up to `LARGE_BATCH` share one, except a single sequence, which needs no search by length."""
    return 1 if batch == 1 else max(LARGE_BATCH, 1 << (batch - 1).bit_length())


def block_sizes(most: int) -> list[int]:
    """The smallest batch of each `batch_block` that batches of up to `most` sequences have."""
    sizes, size = [1, 2], LARGE_BATCH + 1
    while size <= most:
        sizes.append(size)
        size = batch_block(size) + 1
    return [size for size in sizes if size <= most]


@triton.jit
def page_ends(starts, batch, PI: tl.constexpr, BATCH: tl.constexpr, EXACT: tl.constexpr, OWN: tl.constexpr):
    """Where the stretch of each sequence ends, int32 [BATCH]; sequences past `batch` take no room. EXACT pages, the own
    one among them, are not read in sealed form and take OWN units each.

    32 bits are enough for units, and take half the registers through the loop over pages."""
    row = tl.arange(0, BATCH)
    cached = tl.load(starts + row, mask=row < batch, other=0)
    coded = (cached // PI).to(tl.int32)
    if EXACT > 1:
        coded = tl.maximum(coded - (EXACT - 1), 0)
    return tl.cumsum(tl.where(row < batch, coded + EXACT * OWN, 0), 0)


@triton.jit
def sequence_of(unit, ends):
    """The sequence whose stretch holds `unit`."""
    return tl.sum((ends <= unit).to(tl.int32), 0)


@triton.jit
def opening_of(part, parts, total):
    """Where the stretch of a program opens. The stretch of the program before it ends there.

    If `parts` does not divide `total`, the first stretches are longer by a unit. Arithmetic is in 32 bits: a division
    in 64 bits would be a call, and the callee would dictate the use of registers around it.
    """
    return part * (total // parts) + tl.minimum(part, total % parts)


@triton.jit
def exact_pages(units):
    """How many exact pages end within `units` of a sequence's stretch, counted from the first of them. The program in
    whose stretch a page's last unit lies reads that page."""
    return tl.maximum(units, 0) // OWN_UNITS


@triton.jit
def part_of(unit, parts, total):
    """The program whose stretch holds `unit`."""
    length, longer = total // parts, total % parts
    past = unit - longer * (length + 1)
    return tl.where(past < 0, unit // (length + 1), longer + past // length)


@triton.jit
def partial_of(group, groups, part, slot, SIZE: tl.constexpr):
    """Offset of a share: a program has two of them, for the first sequence of its stretch and for the last."""
    return ((part.to(tl.int64) * groups + group) * 2 + slot) * SIZE


@triton.jit
def merged(partials, first, count, group, groups, opens_inside, D: tl.constexpr, N: tl.constexpr):
    """Adds up the shares of `count` programs from `first` on. Returns outputs [D', N], D' a power of two, and weights.

    `opens_inside`: 1 if the sequence does not begin where the stretch of program `first` does.
    """
    SIZE: tl.constexpr = (D + 32) * N
    # Loads in flight: 64 registers.
    AT_ONCE: tl.constexpr = 16 if D * N <= 512 else 8 if D * N <= 1024 else 4 if D * N <= 2048 else 2
    channel = tl.arange(0, triton.next_power_of_2(D))
    column = tl.arange(0, N)
    top = tl.full((N,), float("-inf"), tl.float32)
    weight = tl.zeros((N,), tl.float32)
    out = tl.zeros((triton.next_power_of_2(D), N), tl.float32)
    for begin in range(0, count, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        share = partials + partial_of(group, groups, first + i, tl.where(i == 0, opens_inside, 0), SIZE)
        present = i < count
        tops = tl.load(
            share[:, None] + (D * N + column)[None, :],
            mask=present[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        weights = tl.load(
            share[:, None] + ((D + 16) * N + column)[None, :], mask=present[:, None], other=0.0, cache_modifier=".cg"
        )
        outs = tl.load(
            share[:, None, None] + (channel[:, None] * N + column[None, :])[None, :, :],
            mask=present[:, None, None] & (channel < D)[None, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        kept, factors = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
        weight = weight * kept + tl.sum(weights * factors, 0)
        out = out * kept[None, :] + tl.sum(outs * factors[:, None, :], 0)
        top = new_top
    return out, weight


@triton.jit
def merge_if_last(
    out,
    ticket,
    partials,
    begin,
    end,
    parts,
    total,
    group,
    groups,
    heads,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Draws a ticket for a sequence at units `begin`..`end` whose share this program has stored. If it is the last one,
    the sum of all shares goes to the `heads` query heads at `out`."""
    first = part_of(begin, parts, total)
    count = part_of(end - 1, parts, total) - first + 1
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel") == count - 1:
        opens_inside = tl.where(begin > opening_of(first, parts, total), 1, 0)
        found, weight = merged(partials, first, count, group, groups, opens_inside, D, N)
        channel, column = tl.arange(0, triton.next_power_of_2(D))[:, None], tl.arange(0, N)[None, :]
        x = (found / weight[None, :]).to(out.dtype.element_ty)
        tl.store(out + column * D + channel, x, mask=(column < heads) & (channel < D))
        tl.store(ticket, 0)


class Workspace:
    """Device memory that launches share, one after another on one stream: shares of split sequences, and tickets.

    It grows with larger batches, but not while a CUDA graph is captured: zeroing tickets would be recorded, not run.
    So run a batch of the captured size once before the capture. Memory that it has outgrown stays allocated, because
    graphs go on using the memory that they were captured with.
    """

    def __init__(self, device: torch.device, programs: int) -> None:
        """`programs`: how many run at once on this device, over all KV heads, at `PROGRAMS_PER_PROCESSOR`."""
        self._programs = programs
        self._shared = LEAST_SHARED
        if device.type == "cuda":
            self._shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def parts(self, groups: int, per_processor: int = PROGRAMS_PER_PROCESSOR) -> int:
        """Programs per group of query heads, for a kernel of which a multiprocessor holds `per_processor` programs."""
        return max(1, self._programs * per_processor // PROGRAMS_PER_PROCESSOR // groups)

    def fitting(self, shared: int) -> int:
        """Programs that the shared memory of a multiprocessor holds at a time, if each takes `shared` bytes of it."""
        return max(1, min(PROGRAMS_PER_PROCESSOR, self._shared // (shared + SYSTEM_SHARED)))

    def partials(self, groups: int, parts: int, head_dim: int, columns: int) -> Tensor:
        """Room for two shares per program, FP32."""
        size = groups * parts * 2 * (head_dim + 32) * columns
        if self._partials.numel() < size:
            self._outgrow(self._partials)
            self._partials = self._partials.new_empty(size)
        return self._partials

    def tickets(self, batch: int, groups: int) -> Tensor:
        """Zeroed counters, one per sequence and group of query heads."""
        if self._tickets.numel() < batch * groups:
            self._outgrow(self._tickets)
            self._tickets = self._tickets.new_zeros(batch * groups)
        return self._tickets

    def _outgrow(self, memory: Tensor) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the workspace would grow inside the capture of a CUDA graph: run such a batch before")
        self._outgrown.append(memory)
