"""Ragged batches for tests of decode: sealed pages in a shuffled pool, open pages, NaN where kernels may not read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.layout import from_wire, new_pages
from torch import Tensor

from tests.hack_kernels.pools import empty_pool, reference


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Arguments of `attn_decode`, with the same pages in wire order and in the GPU's."""

    fmt: HackFormat
    wire: Planes
    pages: Planes
    k: Tensor
    """FP16 [N, Hkv, Π, D]: the rows from which the pages were sealed."""
    v: Tensor
    open_k: Tensor
    open_v: Tensor
    spans: Spans
    q: Tensor

    @property
    def pool(self) -> Pool:
        """Pages in the GPU's order."""
        return Pool(self.pages, self.open_k, self.open_v)

    def expected(self) -> Tensor:
        """The reference's answer."""
        pool = Pool(self.wire, self.open_k, self.open_v)
        return reference(self.fmt).attend(0, pool, self.spans, Rows(self.q))

    def exact(self, k: Tensor, v: Tensor) -> Tensor:
        """FP64 attention over sealed pages of rows k, v [N, Hkv, Π, D] and the own page; one KV head."""
        outs = []
        for b, cached in enumerate(self.spans.starts.tolist()):
            full, rest = divmod(cached, self.fmt.page_tokens)
            ids, slot = self.spans.table[b, :full], self.spans.slots[b]
            keys, values = (
                torch.cat((pages[ids, 0].flatten(0, 1), own[slot, 0, : rest + 1])).double()
                for pages, own in ((k, self.open_k), (v, self.open_v))
            )
            scores = self.q[b].double() @ keys.T / self.fmt.head_dim**0.5
            outs.append(scores.softmax(-1) @ values)
        return torch.stack(outs)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row."""
    return float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def decode_batch(
    fmt: HackFormat, cached: list[int], heads: int, group: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> DecodeBatch:
    """A batch with one query per sequence. `cached[b]` tokens precede it."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int) -> Tensor:
        return torch.randn(count, heads, fmt.page_tokens, fmt.head_dim, generator=generator).half()

    pi, batch = fmt.page_tokens, len(cached)
    counts = [n // pi for n in cached]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    table = torch.zeros(batch, max(counts) + 1, dtype=torch.int64)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) :][:count]
    k, v = rows(len(order)), rows(len(order))
    sealed = empty_pool(reference(fmt), fmt, len(order), heads)
    reference(fmt).seal(0, sealed, torch.arange(len(order)), torch.zeros(len(order), dtype=torch.int64), k, v)
    wire = sealed.planes
    pages = new_pages(fmt, len(order), heads, "cpu")
    for name, plane in from_wire(fmt, wire).items():
        pages[name].copy_(plane)
    for name in ("k_min", "v_scale"):
        pages[name][order[sum(counts) :]] = float("nan")

    slots = torch.randperm(batch + 1, generator=generator)[:batch]
    open_k, open_v = rows(batch + 1), rows(batch + 1)
    for slot, n in zip(slots.tolist(), cached, strict=True):
        open_k[slot, :, n % pi + 1 :] = float("nan")
        open_v[slot, :, n % pi + 1 :] = float("nan")
    ones = torch.ones(batch, dtype=torch.int64)
    spans = Spans(torch.tensor(cached), ones, torch.arange(batch), table, slots)
    q = torch.randn(batch, heads * group, fmt.head_dim, generator=generator).to(dtype)
    return DecodeBatch(fmt, wire, pages, k, v, open_k, open_v, spans, q)
