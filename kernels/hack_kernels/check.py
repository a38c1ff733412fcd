"""Checks that every backend makes on its inputs before it computes; errors name the input and what was expected.

Values (page ids, the sum of counts) are checked only where they lie in host memory: reading them from a GPU would make
every call wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans


def check_seal(fmt: PageFormat, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [P, Hkv, Π, D] FP16 for P page ids and P numbers of first rows. Raises `ValueError`."""
    count = page_ids.numel()
    for name, rows in (("k", k), ("v", v)):
        _shape(name, rows, (count, pool.num_kv_heads, fmt.page_tokens, fmt.head_dim), torch.float16)
    _shape("starts", starts, (count,), torch.int64)
    _same_device(pool, page_ids=page_ids, starts=starts, k=k, v=v)
    _page_ids(pool, page_ids)


def check_install(fmt: PageFormat, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
    """Planes [Hkv, P, ...] in wire order; derived ones may be absent. Raises `ValueError`."""
    known = {plane.name: plane for plane in fmt.planes}
    if unknown := planes.keys() - known.keys():
        raise ValueError(f"planes {sorted(unknown)} are not part of the format")
    for name, plane in known.items():
        if name in planes:
            _shape(name, planes[name], (pool.num_kv_heads, page_ids.numel(), *plane.shape), plane.dtype)
        elif not plane.derived:
            raise ValueError(f"plane {name} is missing")
    _same_device(pool, page_ids=page_ids, **planes)
    _page_ids(pool, page_ids)


def check_requantize(fmt: PageFormat, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
    """k, v [T, Hkv, D] FP16, T rows in all spans. Raises `ValueError`."""
    for name, rows in (("k", k), ("v", v)):
        _shape(name, rows, (k.shape[0], pool.num_kv_heads, fmt.head_dim), torch.float16)
    _same_device(pool, k=k, v=v)


def check_attention(fmt: PageFormat, pool: Pool, spans: Spans, rows: Rows) -> None:
    """q [T, Hq, D]; k, v [T, Hkv, D] FP16 or None (decode: one row per sequence). Raises `ValueError`.

    Only in decode KV heads may have tables of their own.
    """
    q, heads = rows.q, pool.num_kv_heads
    if q.dim() != 3 or q.shape[2] != fmt.head_dim or q.shape[1] % heads:
        raise ValueError(f"q is {tuple(q.shape)}; expected [T, a multiple of {heads} heads, {fmt.head_dim}]")
    if (rows.k is None) != (rows.v is None):
        raise ValueError("k and v are given together or not at all")
    new = {name: x for name, x in (("k", rows.k), ("v", rows.v)) if x is not None}
    for name, x in new.items():
        _shape(name, x, (q.shape[0], heads, fmt.head_dim), torch.float16)
    for name, open_rows in (("open_k", pool.open_k), ("open_v", pool.open_v)):
        _shape(
            name,
            open_rows,
            (open_rows.shape[0], heads, fmt.window.pages * fmt.page_tokens, fmt.head_dim),
            torch.float16,
        )
    batch = spans.starts.numel()
    for name in ("starts", "counts", "offsets", "slots"):
        _shape(name, getattr(spans, name), (batch,), torch.int64)
    lists = (batch, heads) if spans.table.dim() == 3 and not new else (batch,)
    _shape("spans.table", spans.table, (*lists, spans.table.shape[-1]), torch.int64)
    places = {"spans.starts": spans.starts, "spans.table": spans.table}
    _same_device(pool, q=q, open_k=pool.open_k, open_v=pool.open_v, **places, **new)
    if not new:
        if q.shape[0] != batch:
            raise ValueError(f"spans are those of {batch} sequences; q has {q.shape[0]} rows")
    elif q.is_cpu and int(spans.counts.sum()) != q.shape[0]:
        raise ValueError(f"spans cover {int(spans.counts.sum())} rows of {batch} sequences; q has {q.shape[0]}")


def _page_ids(pool: Pool, page_ids: Tensor) -> None:
    total = pool.num_pages
    if page_ids.numel() and page_ids.device.type == "cpu" and (int(page_ids.min()) < 0 or int(page_ids.max()) >= total):
        raise ValueError(f"page ids {page_ids.tolist()} do not lie in a pool of {total}")


def _same_device(pool: Pool, **tensors: Tensor) -> None:
    device = next(iter(pool.planes.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; the pages are on {device}")


def _shape(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}")
