"""Sequences of a ragged batch, one after another, and operations on rows that all definitions of attention share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hack_kernels.base import Pool, Rows, Spans


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part in a call."""

    rows: slice
    """The sequence's rows of the batch."""
    start: int
    """The number of rows that the cache holds before these."""
    table: Tensor
    """[Pmax] or [Hkv, Pmax] int64: the sequence's pages."""
    q: Tensor
    """[n, Hq, D]."""
    own_k: Tensor
    """[m, Hkv, D] FP16: all rows from the first one of the page in which `start` lies."""
    own_v: Tensor
    slot_k: Tensor
    """[E·Π, Hkv, D] FP16: the sequence's slot, as it was before the batch."""
    slot_v: Tensor


def sequences(pool: Pool, spans: Spans, rows: Rows) -> Iterator[SequenceRows]:
    """The parts of a batch; `rows` as in `PageKernels.attend`."""
    for b, (start, count, offset) in enumerate(places(spans)):
        part = slice(offset, offset + count)
        own, slots = list[Tensor](), list[Tensor]()
        for open_rows, new in ((pool.open_k, rows.k), (pool.open_v, rows.v)):
            slot = open_rows[spans.slots[b]].transpose(0, 1)
            here, filled = (
                slot[pool.window.place(start // pool.page_tokens) * pool.page_tokens :],
                start % pool.page_tokens,
            )
            # In decode the new row is in the slot already.
            own.append(here[: filled + 1] if new is None else torch.cat((here[:filled], new[part])))
            slots.append(slot)
        yield SequenceRows(part, start, spans.table[b], rows.q[part], *own, *slots)


def held_pages(plane: Tensor, table: Tensor, count: int) -> Tensor:
    """The first `count` pages of a sequence, [count, Hkv, *plane shape]; `table` as in `SequenceRows`."""
    if table.dim() == 1:
        return plane[table[:count]]
    heads = torch.arange(plane.shape[1], device=plane.device)
    return plane[table[:, :count].T, heads]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal softmax attention in FP32: q [n, Hq, D] are rows start.., k, v [start + n, Hkv, D] -> [n, Hq, D]."""
    n, total = q.shape[0], k.shape[0]
    visible = torch.arange(total, device=q.device)[None, :] <= start + torch.arange(n, device=q.device)[:, None]
    queries, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1).to(q.dtype)


def attention_by_page(part: SequenceRows, sealed: Iterable[Tensor], page_tokens: int) -> Tensor:
    """`exact_attention` of a sequence whose sealed pages differ from their rows: each query sees its own page in FP16.

    `sealed` K and V [rows, Hkv, D]: all sealed pages before the last query's own, as rows -> [n, Hq, D].
    """
    k, v = sealed
    out = torch.empty_like(part.q)
    end, first = part.start + part.q.shape[0], part.start // page_tokens
    for page in range(first, (end - 1) // page_tokens + 1):
        begin, stop = max(part.start, page * page_tokens), min(end, (page + 1) * page_tokens)
        own = slice((page - first) * page_tokens, stop - first * page_tokens)
        seen_k, seen_v = (
            torch.cat((cached[: page * page_tokens].float(), new[own].float()))
            for cached, new in ((k, part.own_k), (v, part.own_v))
        )
        queries = slice(begin - part.start, stop - part.start)
        out[queries] = exact_attention(part.q[queries], seen_k, seen_v, begin)
    return out


def places(spans: Spans) -> list[tuple[int, int, int]]:
    """(start, count, offset) of every sequence."""
    return list(zip(spans.starts.tolist(), spans.counts.tolist(), spans.offsets.tolist(), strict=True))


def group_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hkv, g·n, D] FP32, scaled by 1/sqrt(D): the query heads that share a KV head become its rows."""
    n, heads, dim = q.shape
    grouped = q.float().view(n, num_kv_heads, heads // num_kv_heads, dim).permute(1, 2, 0, 3)
    return grouped.flatten(1, 2) / math.sqrt(dim)


def ungroup_heads(out: Tensor, n: int) -> Tensor:
    """Inverse of `group_heads`, without the scale."""
    heads, rows, dim = out.shape
    return out.view(heads, rows // n, n, dim).permute(2, 0, 1, 3).flatten(1, 2)
