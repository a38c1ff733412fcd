"""Sequences in a pool, for tests of the C++ kernels, and the instruction sets to test."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hack_kernels.base import BackendUnavailable, Pool, Rows, Spans
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.hack_format import Arithmetic, HackFormat, HackKernels, OpenPage, Rounding
from torch import Tensor

from tests.hack_kernels.pools import empty_pool, random_rows

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

LAYER = 3
FORMATS = [
    HackFormat(d, pi, kb, vb, rounding=r, arithmetic=a, open_page=o, seed=2**40 + 7)
    for (d, pi), (kb, vb), r, (a, o) in itertools.product(
        [(64, 32), (96, 64), (128, 64), (256, 128)],
        [(2, 2), (4, 2), (2, 4), (4, 4), (8, 2), (4, 8), (8, 8)],
        Rounding,
        [(Arithmetic.SYMMETRIC, OpenPage.EXACT), (Arithmetic.ASYMMETRIC, OpenPage.K_CODES)],
    )
]


class Case:
    """Sequences of given lengths in one pool, with pages in shuffled order, and the arguments of calls on them."""

    def __init__(self, fmt: HackFormat, lengths: list[int], heads: int, seed: int = 0) -> None:
        pi, d = fmt.page_tokens, fmt.head_dim
        self.fmt, self.lengths, self.heads = fmt, lengths, heads
        self.k = [random_rows(seed + 2 * i, n, heads, d).half() for i, n in enumerate(lengths)]
        self.v = [random_rows(seed + 2 * i + 1, n, heads, d).half() for i, n in enumerate(lengths)]
        coded = pi - 1 if fmt.open_page is OpenPage.REQUANTIZE else 0  # then the open page rests as codes, too
        counts = [(n + coded) // pi for n in lengths]
        total = sum(counts)
        shuffled = torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed)).tolist()
        self.table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int64)
        for b, count in enumerate(counts):
            for p in range(count):
                self.table[b, p] = shuffled.pop()
        self.num_pages = total + 1

    def pool(self, kernels: HackKernels, head_start: int = 0) -> Pool:
        """A pool with the sealed pages of every sequence. Open pages are empty."""
        fmt, pi = self.fmt, self.fmt.page_tokens
        pool = empty_pool(kernels, fmt, self.num_pages, self.heads, len(self.lengths))
        pool = replace(pool, head_start=head_start)
        if fmt.open_page is OpenPage.REQUANTIZE:
            kernels.requantize(LAYER, pool, self.spans([0] * len(self.lengths)), *map(torch.cat, (self.k, self.v)))
            return pool
        for b, n in enumerate(self.lengths):
            full = n // pi
            if full:
                starts = torch.arange(full) * pi
                k, v = (x[b][: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (self.k, self.v))
                kernels.seal(LAYER, pool, self.table[b, :full], starts, k, v)
        return pool

    def decode_spans(self, *pools: Pool) -> Spans:
        """Spans of decode. The query is the last row of each sequence, and its KV is put into the open pages of
        `pools`."""
        batch = len(self.lengths)
        for pool in pools:
            self._open(pool, self.lengths, [(n - 1) // self.fmt.page_tokens for n in self.lengths])
        starts = torch.tensor(self.lengths) - 1
        ones, order = torch.ones(batch, dtype=torch.int64), torch.arange(batch)
        return Spans(starts, ones, order, self.table, order)

    def prefill(self, kernels: HackKernels, pool: Pool, q: list[Tensor], begins: list[int]) -> Tensor:
        """Attend to rows begins[b].. of every sequence, in one batch."""
        self._open(pool, begins, [begin // self.fmt.page_tokens for begin in begins])
        rows = (torch.cat([x[begin:] for x, begin in zip(xs, begins, strict=True)]) for xs in (q, self.k, self.v))
        return kernels.attend(LAYER, pool, self.spans(begins), Rows(*rows))

    def _open(self, pool: Pool, ends: list[int], pages: list[int]) -> None:
        """Put rows of page pages[b] before ends[b] into open page b."""
        for b, (end, page) in enumerate(zip(ends, pages, strict=True)):
            first = page * self.fmt.page_tokens
            pool.open_k[b, :, : end - first] = self.k[b][first:end].transpose(0, 1)
            pool.open_v[b, :, : end - first] = self.v[b][first:end].transpose(0, 1)

    def spans(self, begins: list[int]) -> Spans:
        """The spans of rows begins[b].. of every sequence."""
        starts = torch.tensor(begins)
        counts = torch.tensor(self.lengths) - starts
        return Spans(starts, counts, counts.cumsum(0) - counts, self.table, torch.arange(len(begins)))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
