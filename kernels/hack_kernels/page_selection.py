"""The pages that decode reads, selected by the bounds of their keys (MPCache, arXiv 2501.06807, §4.3).

A page is the paper's cluster. Eq. 2 scores it for a query q: Sim = Σ_d q_d (α r_max,d + (1 - α) r_min,d). Here r_max
and r_min are the largest and the least value of each channel of the page's keys, and q is the sum of the query heads
that share a KV head. A pair of pages has bounds of its own, and a score by them.

The definition scores in FP64, C++ (`key_bounds.h`) in FP32, every sum in one order: it may prefer another one of two
pages whose scores differ by a millionth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BoundedPages:
    """The sealed pages of a decode batch, and the bounds of their keys."""

    least: Tensor
    """[pages, Hkv, D] float16, by pool index."""
    most: Tensor
    """[pages, Hkv, D] float16."""
    table: Tensor
    """[B, P] int64: the pool indices of each sequence's pages."""
    sealed: Tensor
    """[B] int64: how many of them are sealed."""


class PageSelectKernels(Protocol):
    """Operations for codecs that read some pages."""

    def select_pages(self, q: Tensor, pages: BoundedPages, counts: Tensor, alpha: float, *, halve: bool) -> Tensor:
        """Tables [B, Hkv, P] int64 of the pages that q [B, Hq, D] reads: each begins with `counts` [B] int64 sealed
        pages, at least 2 or all, in the order of the sequence.

        The first and the last sealed page are among them, and then those with the best scores. `halve`: those that do
        not belong to the better half of the pairs of pages come after all others.
        """
        ...


class PageSelecting:
    """Implements `PageSelectKernels` on any device."""

    def select_pages(self, q: Tensor, pages: BoundedPages, counts: Tensor, alpha: float, *, halve: bool) -> Tensor:
        """In torch; a sort for each level."""
        table, heads = pages.table, pages.least.shape[1]
        queries = q.double().unflatten(1, (heads, -1)).sum(2)[:, :, None]  # [B, Hkv, 1, D]
        sealed = pages.sealed[:, None, None]
        at = torch.arange(table.shape[1], device=q.device)
        held = at < sealed  # [B, 1, P]
        bounds = [bound[table].transpose(1, 2).double() for bound in (pages.least, pages.most)]  # [B, Hkv, P, D]
        scores = (queries * (alpha * bounds[1] + (1 - alpha) * bounds[0])).sum(-1)
        dropped = None
        if halve:
            least, most = (
                torch.nn.functional.pad(bound.masked_fill(~held[..., None], edge), (0, 0, 0, len(at) % 2), value=edge)
                for bound, edge in zip(bounds, (torch.inf, -torch.inf), strict=True)
            )
            least, most = least.unflatten(2, (-1, 2)).amin(3), most.unflatten(2, (-1, 2)).amax(3)
            number = (sealed + 1) // 2
            of_pairs = _rank((queries * (alpha * most + (1 - alpha) * least)).sum(-1), number)
            late = of_pairs >= ((number + 1) // 2).clamp(min=2)
            dropped = late.repeat_interleave(2, -1)[..., : len(at)]
        chosen = _rank(scores, sealed, dropped) < counts[:, None, None]
        order = at.where(chosen, at + len(at)).argsort(-1)
        return table[:, None].expand_as(order).gather(-1, order)


def _rank(scores: Tensor, number: Tensor, dropped: Tensor | None = None) -> Tensor:
    """The rank of each of the first `number` [B, 1, 1] pages or pairs, by descending scores [B, Hkv, P]. The first and
    the last rank before all others, and those that are `dropped` [B, Hkv, P] after all others."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    ends = (at == 0) | (at == number - 1)
    order = scores.masked_fill(ends, torch.inf).argsort(dim=-1, descending=True, stable=True)
    late = (at >= number).long() * 2
    late = late.expand_as(scores) if dropped is None else late + dropped
    return order.gather(-1, late.gather(-1, order).argsort(dim=-1, stable=True)).argsort(-1)
