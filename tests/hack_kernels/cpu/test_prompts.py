"""Prompts on every instruction set: the result of a row does not depend on other rows, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import PageFormat, Pool, Rows, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.levels import LevelReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import Window
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows

HEADS, GROUP = 2, 3
FORMATS: list[tuple[PageFormat, Callable[..., Any]]] = [
    (LevelFormat(64, 64, 3, 2, Window(1, 2)), LevelReference),
    (LevelFormat(80, 32, 4, 8), LevelReference),
    (LevelFormat(128, 32, 2, 3, Window(0, 1)), LevelReference),
    (HackFormat(64, 64), HackReference),
    (HackFormat(128, 32, 4, 2), HackReference),
    (HackFormat(96, 32, 8, 8), HackReference),
    (RowFormat(64, 64), RowReference),
    (RowFormat(80, 32), RowReference),
]


class Prompt:
    """A sequence whose full pages are sealed."""

    def __init__(self, backend: cpu.CpuBackend, fmt: PageFormat, definition: Callable[..., Any], n: int) -> None:
        pi, full, d = fmt.page_tokens, n // fmt.page_tokens, fmt.head_dim
        self.k, self.v = (random_rows(seed, n, HEADS, d).half() for seed in (1, 2))
        self.q, self.kernels = random_rows(3, n, HEADS * GROUP, d), backend.kernels_for(fmt, definition)
        assert self.kernels.served_by == "cpu"
        self.pool = new_pool(fmt, self.kernels, CPU, full, 1, range(HEADS))
        sealed = (x[: full * pi].unflatten(0, (full, pi)).transpose(1, 2).contiguous() for x in (self.k, self.v))
        self.kernels.seal(0, self.pool, torch.arange(full), torch.arange(full) * pi, *sealed)

    def attend(self, begin: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Attend to rows begin .. stop as a separate chunk."""
        for slots, x in ((self.pool.open_k, self.k), (self.pool.open_v, self.v)):
            slots.fill_(torch.nan)
            numbers = self._exact_rows(self.pool, begin)
            slots[0][:, self.pool.window.at(numbers, self.pool.page_tokens)] = x[numbers].transpose(0, 1)
        part, table = slice(begin, stop), torch.arange(self.k.shape[0] // self.pool.page_tokens)[None]
        zero = torch.tensor([0])
        spans = Spans(zero + begin, zero + stop - begin, zero, table, zero)
        rows = Rows(self.q[part].to(dtype), self.k[part], self.v[part])
        out: Tensor = self.kernels.attend(0, self.pool, spans, rows)
        return out

    @staticmethod
    def _exact_rows(pool: Pool, begin: int) -> Tensor:
        """The numbers of the rows before `begin` that a slot contains."""
        pi = pool.page_tokens
        pages = (*pool.window.earlier(begin // pi), begin // pi)
        return torch.tensor([row for page in pages for row in range(page * pi, min((page + 1) * pi, begin))]).long()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("fmt", "definition"), FORMATS, ids=[str(fmt) for fmt, _ in FORMATS])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    backend: cpu.CpuBackend, fmt: PageFormat, definition: Callable[..., Any], dtype: torch.dtype
) -> None:
    """On one thread, chunks of five rows or more, cut anywhere, give the same bits as the whole prompt."""
    backend.threads = 1
    n = 4 * fmt.page_tokens + 21
    prompt = Prompt(backend, fmt, definition, n)
    whole = prompt.attend(0, n, dtype)
    assert bool(whole.isfinite().all())
    for begin, stop in ((0, 5), (7, fmt.page_tokens), (fmt.page_tokens + 9, 3 * fmt.page_tokens + 6), (n - 16, n)):
        assert torch.equal(prompt.attend(begin, stop, dtype), whole[begin:stop]), (begin, stop)
