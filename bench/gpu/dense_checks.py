"""Prompts that read dequantized pages, against FP64 attention over the rows that a query sees."""

from __future__ import annotations

import torch
from hack_kernels.base import PageFormat, Rows, Spans
from hack_kernels.pools import new_pool
from hack_kernels.triton.backend import Prefill, TritonBackend
from torch import Tensor

from bench.gpu.comparing import CPU, close, moved, poison, poisoned_pool, reconstructed, spans_on
from bench.gpu.shapes import definition_of, kernels_of


def check_dense(fmt: PageFormat, group: int, backend: TritonBackend, heads: int = 2) -> None:
    """Prompts around page boundaries that read dequantized pages, against FP64 attention over the rows that a query
    sees. The rows of a prompt in two parts must be bit-equal to those of the whole prompt."""
    pi, d, device = fmt.page_tokens, fmt.head_dim, backend.device
    kernels, reference = kernels_of(TritonBackend(device, Prefill.DENSE), fmt), definition_of(fmt)
    pairs = [(0, pi), (pi - 1, 2), (2 * pi + 3, 2 * pi + 1), (5 * pi, 1)]
    starts, counts = (torch.tensor(x) for x in zip(*pairs, strict=True))
    most, order = 6, torch.randperm(len(pairs))
    k, v = (torch.randn(len(pairs), most * pi, heads, d).half() for _ in "kv")  # of all sequences
    table = torch.randperm(most * len(pairs)).view(-1, most)
    ids, numbers = table.flatten(), torch.arange(most).repeat(len(pairs)) * pi
    expected = new_pool(fmt, reference, CPU, len(ids), len(pairs), range(heads))
    reference.seal(
        0, expected, ids, numbers, *(x.unflatten(1, (most, pi)).flatten(0, 1).transpose(1, 2) for x in (k, v))
    )
    held = [
        x[table].transpose(2, 3).flatten(1, 2)
        for x in reconstructed(fmt, reference.export(expected, ids[ids.argsort()]))
    ]
    pool = poisoned_pool(backend, fmt, len(ids), heads, slots=len(pairs))
    kernels.install(pool, ids.to(device), moved(reference.export(expected, ids), device))
    q = torch.randn(len(pairs), most * pi, heads * group, d).bfloat16()

    def attended(starts: list[int], counts: list[int]) -> list[Tensor]:
        rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        for b, start in enumerate(starts):
            for exact, x in ((pool.open_k, k), (pool.open_v, v)):
                exact[order[b]] = torch.nan
                for page in range(-(-start // pi)):
                    if page in (*fmt.window.earlier(start // pi), start // pi):
                        part, at = slice(page * pi, min((page + 1) * pi, start)), fmt.window.place(page) * pi
                        exact[order[b], :, at : at + part.stop - part.start] = x[b, part].transpose(0, 1).to(device)
        sizes = torch.tensor(counts)
        spans = Spans(torch.tensor(starts), sizes, sizes.cumsum(0) - sizes, table, order)
        flat = [torch.cat([x[b, part] for b, part in enumerate(rows)]).to(device) for x in (q, k, v)]
        poison(flat[0], device)
        return list(kernels.attend(0, pool, spans_on(spans, device), Rows(*flat)).split(counts))

    whole = attended(starts.tolist(), counts.tolist())
    for b, (start, count) in enumerate(pairs):
        exact = _seen(fmt, q[b, start : start + count], start, (k[b], v[b]), (held[0][b], held[1][b]))
        close(whole[b], exact, "dense")
    firsts = [(count + 1) // 2 for count in counts.tolist()]
    part = attended(starts.tolist(), firsts)
    for b, count in enumerate(firsts):
        if not torch.equal(part[b], whole[b][:count]):
            raise AssertionError("dense: rows differ by where the prompt was cut")


def _seen(fmt: PageFormat, q: Tensor, start: int, exact: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> Tensor:
    """FP64 attention [n, Hq, D] of rows q from number `start` on, over rows [m, Hkv, D], coded or exact by `fmt`."""
    pi, outs = fmt.page_tokens, []
    for i, each in enumerate(q):
        page, stop = (start + i) // pi, start + i + 1
        coded = fmt.window.coded(page)
        rows = [x[:stop].double().clone() for x in exact]
        for mine, codes in zip(rows, held, strict=True):
            mine[coded.start * pi : coded.stop * pi] = codes[coded.start * pi : coded.stop * pi]
        keys, values = (x.transpose(0, 1) for x in rows)
        queries = each.double().unflatten(0, (keys.shape[0], -1))
        weights = (queries @ keys.mT / q.shape[-1] ** 0.5).softmax(-1)
        outs.append((weights @ values).flatten(0, 1))
    return torch.stack(outs)
