"""Preconditions of the kernel operations, shared by all backends: a wrong input is named before any work.

Shapes, types and devices are always checked; values (page ids, lengths) only where they lie in the processor's memory,
as reading them from a GPU would make every call wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import SUM_PLANES, HackFormat, HackPages, Spans


def check_seal(fmt: HackFormat, pages: HackPages, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [P, Hkv, Π, D] FP16 for P page ids and P start positions. Raises `ValueError`."""
    count, heads = page_ids.numel(), pages["k_codes"].shape[1]
    for name, rows in (("k", k), ("v", v)):
        _shape(name, rows, (count, heads, fmt.page_tokens, fmt.head_dim), torch.float16)
    _shape("starts", starts, (count,), torch.int64)
    _same_device(pages["k_codes"], page_ids=page_ids, starts=starts, k=k, v=v)
    _page_ids(pages, page_ids)


def check_install(fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
    """Planes [Hkv, P, ...] in wire order; sums may be absent. Raises `ValueError`."""
    count, heads = page_ids.numel(), pages["k_codes"].shape[1]
    specs = fmt.plane_specs()
    if unknown := planes.keys() - specs.keys():
        raise ValueError(f"planes {sorted(unknown)} are not part of the format")
    for name, (shape, dtype) in specs.items():
        if name in planes:
            _shape(name, planes[name], (heads, count, *shape), dtype)
        elif name not in SUM_PLANES:
            raise ValueError(f"plane {name} is missing")
    _same_device(pages["k_codes"], page_ids=page_ids, **planes)
    _page_ids(pages, page_ids)


def check_requantize(fmt: HackFormat, pages: HackPages, spans: Spans, k: Tensor, v: Tensor) -> None:
    """k, v [T, Hkv, D] FP16, T rows in all spans. Raises `ValueError`."""
    for name, rows in (("k", k), ("v", v)):
        _shape(name, rows, (k.shape[0], pages["k_codes"].shape[1], fmt.head_dim), torch.float16)
    _same_device(pages["k_codes"], k=k, v=v)


def check_attention(
    fmt: HackFormat,
    pages: HackPages,
    open_k: Tensor,
    open_v: Tensor,
    spans: Spans,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
) -> None:
    """q [T, Hq, D]; k, v [T, Hkv, D] FP16 or None (decode: one row per sequence). Raises `ValueError`."""
    _check_queries(pages["k_codes"], (fmt.page_tokens, fmt.head_dim), open_k, open_v, spans, q, k, v)


def _check_queries(
    plane: Tensor,
    page: tuple[int, ...],
    open_k: Tensor,
    open_v: Tensor,
    spans: Spans,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
) -> None:
    """`plane` [N, Hkv, ...] is one of the pool's, `page` is (Π, D)."""
    heads, head_dim = plane.shape[1], page[1]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % heads:
        raise ValueError(f"q is {tuple(q.shape)}; expected [T, a multiple of {heads} heads, {head_dim}]")
    for name, rows in (("k", k), ("v", v)):
        if rows is not None:
            _shape(name, rows, (q.shape[0], heads, head_dim), torch.float16)
    for name, pool in (("open_k", open_k), ("open_v", open_v)):
        _shape(name, pool, (pool.shape[0], heads, *page), torch.float16)
    batch = spans.starts.numel()
    for name in ("starts", "counts", "offsets", "slots"):
        _shape(name, getattr(spans, name), (batch,), torch.int64)
    given = {"q": q, "open_k": open_k, "open_v": open_v, "spans.starts": spans.starts, "spans.table": spans.table}
    _same_device(plane, **given, **({} if k is None or v is None else {"k": k, "v": v}))
    if k is None:
        if q.shape[0] != batch:
            raise ValueError(f"spans are those of {batch} sequences; q has {q.shape[0]} rows")
    elif q.is_cpu and int(spans.counts.sum()) != q.shape[0]:
        raise ValueError(f"spans cover {int(spans.counts.sum())} rows of {batch} sequences; q has {q.shape[0]}")


def check_rows(
    pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor, k: Tensor | None, v: Tensor | None
) -> None:
    """Pages `k` and `v` [N, Hkv, Π, D] FP16, the rest as in `check_attention`. Raises `ValueError`."""
    for name in ("k", "v"):
        _shape(f"pages of {name}", pages[name], tuple(pages["k"].shape), torch.float16)
    _check_queries(pages["k"], pages["k"].shape[2:], open_k, open_v, spans, q, k, v)


def _page_ids(pages: HackPages, page_ids: Tensor) -> None:
    total = pages["k_codes"].shape[0]
    if page_ids.numel() and page_ids.device.type == "cpu" and (int(page_ids.min()) < 0 or int(page_ids.max()) >= total):
        raise ValueError(f"page ids {page_ids.tolist()} do not lie in a pool of {total}")


def _same_device(plane: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != plane.device:
            raise ValueError(f"{name} is on {tensor.device}; the pages are on {plane.device}")


def _shape(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}")
