"""The definition of homomorphic attention in plain torch: Eq. (4) of the paper on packed codes, never dequantized.

For partitions A = s_a·a' + m_a and B = s_b·b' + m_b of Z elements:
Σ A·B = s_a s_b Σa'b' + m_b s_a Σa' + m_a s_b Σb' + Z m_a m_b.

Σa'b' is an integer dot. It is carried out by FP32 matrix products on integer values: every partial sum is an integer
below 2^24 (at most 255·15·128), which FP32 holds exactly, in any order of summation. Partitions accumulate in FP32.

This file is read, not raced: it is never optimised, and every other backend is tested against it.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hack_kernels.base import SUM_PLANES, Arithmetic, HackFormat, HackKernels, HackPages, OpenPage, Spans, sum_dtype
from hack_kernels.check import check_attention, check_install, check_requantize, check_rows, check_seal
from hack_kernels.quantize import Quantized, pack, quantize_k, quantize_v, unpack
from hack_kernels.rowwise import Rowwise

Q_LEVELS_SYMMETRIC = 127
P_LEVELS_SYMMETRIC = 127
LEVELS_ASYMMETRIC = 255
FP16_MAX = 65504.0  # the scale is rounded up, so x^ may pass the largest value by less than a step
INT8_OFFSET = 128  # asymmetric q' is kept as signed INT8, its minimum shifted to match: FP32 then cancels far less


class Codes(NamedTuple):
    """The sealed pages of one sequence, unpacked to FP32 integers: everything Eq. (4) needs of them."""

    k: Tensor  # [Hkv, G, n, Z], n = tokens of all pages
    k_min: Tensor  # [Hkv, G, n]
    k_scale: Tensor  # [Hkv, G, n]
    k_sums: Tensor | None  # [Hkv, G, n]
    v: Tensor  # [Hkv, P, Π, D]
    v_min: Tensor  # [Hkv, P, D]
    v_scale: Tensor  # [Hkv, P, D]
    v_sums: Tensor | None  # [Hkv, P, D]

    def first(self, pages: int, page_tokens: int) -> Codes:
        """The leading pages only."""
        n = pages * page_tokens
        k_sums = None if self.k_sums is None else self.k_sums[..., :n]
        v_sums = None if self.v_sums is None else self.v_sums[:, :pages]
        k = (self.k[:, :, :n], self.k_min[..., :n], self.k_scale[..., :n], k_sums)
        return Codes(*k, self.v[:, :pages], self.v_min[:, :pages], self.v_scale[:, :pages], v_sums)


class Query(NamedTuple):
    """Q in 8 bits per (row, head, partition of head_dim), values FP32."""

    codes: Tensor  # [Hkv, G, R, Z]
    scale: Tensor  # [Hkv, G, R]
    minimum: Tensor | None  # [Hkv, G, R], None in the symmetric form
    sums: Tensor  # [Hkv, G, R]


class ReferenceKernels(Rowwise):
    """Backend `reference`; implements `HackKernels`."""

    name = "reference"
    isa = "torch"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.approximation_s = 0.0

    def new_pages(self, fmt: HackFormat, num_pages: int, num_kv_heads: int) -> HackPages:
        """A zeroed pool for one layer."""
        return {
            name: torch.zeros((num_pages, num_kv_heads, *shape), dtype=dtype)
            for name, (shape, dtype) in fmt.plane_specs().items()
        }

    def seal(
        self, fmt: HackFormat, layer: int, pages: HackPages, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Quantize full pages into the pool, one page after another."""
        check_seal(fmt, pages, page_ids, starts, k, v)
        steps = torch.arange(fmt.page_tokens)
        for page_id, start, k_page, v_page in zip(page_ids.tolist(), starts.tolist(), k, v, strict=True):
            positions = start + steps
            k_codes = quantize_k(fmt, layer, k_page.transpose(0, 1), positions)
            v_codes = quantize_v(fmt, layer, v_page.transpose(0, 1), positions)
            self._store(fmt, pages, page_id, k_codes, v_codes)

    def requantize(self, fmt: HackFormat, layer: int, pages: HackPages, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Ablation HACK/RQE: what the paper's requantization elimination saves. Page after page."""
        check_requantize(fmt, pages, spans, k, v)
        pi = fmt.page_tokens
        for b, (start, count, offset) in enumerate(_rows(spans)):
            for page in range(start // pi, (start + count - 1) // pi + 1):
                begin, stop = max(start, page * pi), min(start + count, (page + 1) * pi)
                rows = slice(offset + begin - start, offset + stop - start)
                page_id, old = int(spans.table[b, page]), begin - page * pi
                self._requantize_page(fmt, layer, pages, page_id, page * pi, old, k[rows], v[rows])

    def _requantize_page(
        self, fmt: HackFormat, layer: int, pages: HackPages, page_id: int, start: int, old: int, k: Tensor, v: Tensor
    ) -> None:
        """A page from position `start` on holds `old` rows; k, v [n, Hkv, D] follow."""
        total = old + k.shape[0]
        positions = start + torch.arange(total)
        resting = Quantized(
            unpack(pages["v_codes"][page_id], fmt.v_bits, axis=-1), pages["v_min"][page_id], pages["v_scale"][page_id]
        )
        kept = resting.dequantize()[..., :old].permute(2, 0, 1).clamp(max=FP16_MAX).to(torch.float16)
        v_codes = quantize_v(fmt, layer, torch.cat((kept, v)), positions)
        k_new = quantize_k(fmt, layer, k, positions[old:])
        k_old = _resting_k(fmt, pages, page_id, old)
        k_codes = Quantized(*(torch.cat((a, b)) for a, b in zip(k_old, _fields(k_new), strict=True)))
        self._store(fmt, pages, page_id, k_codes, v_codes)

    def _store(self, fmt: HackFormat, pages: HackPages, page_id: int, k: Quantized, v: Quantized) -> None:
        """Pack one page, whole or partly filled: k codes [n, Hkv, G, Z], v codes [Hkv, D, n], n <= Π."""
        missing = fmt.page_tokens - k.codes.shape[0]
        k_rows = k.codes.flatten(2).permute(1, 0, 2)  # [Hkv, n, D]
        k_rows = torch.nn.functional.pad(k_rows, (0, 0, 0, missing))
        v_rows = torch.nn.functional.pad(v.codes, (0, missing))
        pages["k_codes"][page_id] = pack(k_rows, fmt.k_bits, axis=-2)
        pages["v_codes"][page_id] = pack(v_rows, fmt.v_bits, axis=-1)
        for name, rows in (("k_min", k.minimum), ("k_scale", k.scale)):
            pages[name][page_id] = torch.nn.functional.pad(rows.transpose(0, 1), (0, 0, 0, missing))
        pages["v_min"][page_id], pages["v_scale"][page_id] = v.minimum, v.scale
        if fmt.sums:
            ids = torch.tensor([page_id])
            for name, sums in _sums(fmt, {name: plane[ids] for name, plane in pages.items()}).items():
                pages[name][ids] = sums

    def install(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
        """The reference rests in wire order, so this copies; sums that did not travel are counted."""
        check_install(fmt, pages, page_ids, planes)
        for name, plane in planes.items():
            pages[name][page_ids] = plane.transpose(0, 1)
        if fmt.sums and SUM_PLANES[0] not in planes:
            for name, sums in _sums(fmt, {name: pages[name][page_ids] for name in ("k_codes", "v_codes")}).items():
                pages[name][page_ids] = sums

    def export(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> HackPages:
        """Wire order is resting order; heads move to the front."""
        return {name: pages[name][page_ids].transpose(0, 1).contiguous() for name in fmt.plane_specs()}

    def attn_prefill(
        self,
        fmt: HackFormat,
        layer: int,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Sequence after sequence, and in each the queries of one page after another."""
        check_attention(fmt, pages, open_k, open_v, spans, q, k, v)
        out = torch.empty_like(q)
        for b, (start, count, offset) in enumerate(_rows(spans)):
            rows = slice(offset, offset + count)
            filled = start % fmt.page_tokens
            slot = spans.slots[b]
            own_k = torch.cat((open_k[slot, :, :filled].transpose(0, 1), k[rows]))
            own_v = torch.cat((open_v[slot, :, :filled].transpose(0, 1), v[rows]))
            out[rows] = self._attend(fmt, layer, pages, spans.table[b], start, q[rows], own_k, own_v)
        return out

    def attn_decode(
        self, fmt: HackFormat, layer: int, pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor
    ) -> Tensor:
        """One query per sequence; its own row is the last of the open page."""
        check_attention(fmt, pages, open_k, open_v, spans, q, None, None)
        out = torch.empty_like(q)
        for b, (start, _, offset) in enumerate(_rows(spans)):
            slot, rows = spans.slots[b], start % fmt.page_tokens + 1
            own_k, own_v = (pool[slot, :, :rows].transpose(0, 1) for pool in (open_k, open_v))
            row = slice(offset, offset + 1)
            out[row] = self._attend(fmt, layer, pages, spans.table[b], start, q[row], own_k, own_v)
        return out

    def new_rows(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int) -> HackPages:
        """Zeroed planes `k` and `v`."""
        return {
            name: torch.zeros((num_pages, num_kv_heads, page_tokens, head_dim), dtype=torch.float16) for name in "kv"
        }

    def attn_rows(
        self,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """FP32 through torch's `scaled_dot_product_attention`, sequence by sequence."""
        check_rows(pages, open_k, open_v, spans, q, k, v)
        page_tokens = open_k.shape[2]
        out = torch.empty_like(q)
        for b, (start, count, offset) in enumerate(_rows(spans)):
            rows = slice(offset, offset + count)
            full, rest = divmod(start, page_tokens)
            whole = []
            for plane, open_rows, new in ((pages["k"], open_k, k), (pages["v"], open_v, v)):
                sealed = plane[spans.table[b, :full]].transpose(1, 2).flatten(0, 1)
                filled = open_rows[spans.slots[b]].transpose(0, 1)  # in decode the new row stands there already
                own = filled[: rest + 1] if new is None else torch.cat((filled[:rest], new[rows]))
                whole.append(torch.cat((sealed, own)))
            out[rows] = _exact(q[rows], whole[0], whole[1], start)
        return out

    def _attend(
        self,
        fmt: HackFormat,
        layer: int,
        pages: HackPages,
        table: Tensor,
        start: int,
        q: Tensor,
        own_k: Tensor,
        own_v: Tensor,
    ) -> Tensor:
        """One sequence: q [n, Hq, D] from position `start`; own rows [m, Hkv, D] begin at the page `start` lies in."""
        pi, end = fmt.page_tokens, start + q.shape[0]
        first, last = start // pi, (end - 1) // pi
        sees_own_codes = fmt.open_page is OpenPage.REQUANTIZE
        codes = self._unpack(fmt, pages, table[: last + sees_own_codes])
        blocks = []
        for page in range(first, last + 1):
            begin, stop = max(start, page * pi), min(end, (page + 1) * pi)
            positions = torch.arange(begin, stop)
            q_block = _group(q[begin - start : stop - start], own_k.shape[1])
            sealed = codes.first(page + sees_own_codes, pi)
            own = slice((page - first) * pi, stop - first * pi)
            own_rows = (own_k[own][:0], own_v[own][:0]) if sees_own_codes else (own_k[own], own_v[own])
            block = self._attend_block(fmt, layer, sealed, q_block, positions, page * pi, *own_rows)
            blocks.append(_ungroup(block, stop - begin))
        return torch.cat(blocks).to(q.dtype)

    def _attend_block(
        self,
        fmt: HackFormat,
        layer: int,
        sealed: Codes,
        q: Tensor,
        positions: Tensor,
        page_start: int,
        own_k: Tensor,
        own_v: Tensor,
    ) -> Tensor:
        """Queries of one page, q [Hkv, g·n, D] FP32 scaled: pages as codes, own rows by the open-page rule, merged."""
        pi, group = fmt.page_tokens, q.shape[1] // positions.numel()
        row_positions = positions.repeat(group)
        query = quantize_query(fmt, q)
        num_pages = sealed.v.shape[1]
        scores = self._scores(fmt, query, sealed.k, sealed.k_min, sealed.k_scale, sealed.k_sums)
        keys = torch.arange(num_pages * pi)
        scores = scores.masked_fill(keys[None, :] > row_positions[:, None], -math.inf)
        scores = scores.unflatten(-1, (num_pages, pi))
        own_positions = page_start + torch.arange(own_k.shape[0])
        own = self._own_scores(fmt, layer, query, q, own_k, own_positions)
        own = own.masked_fill(own_positions[None, :] > row_positions[:, None], -math.inf)

        page_max = scores.amax(-1)  # [Hkv, R, P]
        overall = torch.cat((page_max, own), -1).amax(-1)  # [Hkv, R]
        outputs, weights = self._weigh_pages(fmt, torch.exp(scores - page_max[..., None]), sealed)
        beta = torch.exp(page_max - overall[..., None])
        p_own = torch.exp(own - overall[..., None])
        numerator = (beta[..., None] * outputs).sum(2) + p_own @ own_v.float().transpose(0, 1)
        return numerator / ((beta * weights).sum(-1) + p_own.sum(-1))[..., None]

    def _own_scores(
        self, fmt: HackFormat, layer: int, query: Query, q: Tensor, own_k: Tensor, positions: Tensor
    ) -> Tensor:
        """Scores [Hkv, R, m] against the query's own page: exact, or on codes made at once."""
        if fmt.open_page is OpenPage.EXACT:
            return q @ own_k.float().permute(1, 2, 0)
        codes = quantize_k(fmt, layer, own_k, positions)
        integers = codes.codes.float().permute(1, 2, 0, 3)
        meta = (codes.minimum.float().permute(1, 2, 0), codes.scale.float().permute(1, 2, 0))
        sums = integers.sum(-1) if fmt.arithmetic is Arithmetic.ASYMMETRIC else None
        return self._scores(fmt, query, integers, *meta, sums)

    def _scores(
        self, fmt: HackFormat, query: Query, k: Tensor, k_min: Tensor, k_scale: Tensor, k_sums: Tensor | None
    ) -> Tensor:
        """Eq. (4) for Q·K^T: [Hkv, R, n] FP32, summed over the partitions of head_dim."""
        dots = query.codes @ k.transpose(-1, -2)  # [Hkv, G, R, n]
        began = perf_counter()
        minimum, scale = k_min[:, :, None, :], k_scale[:, :, None, :]
        q_scale = query.scale[..., None]
        scores = q_scale * scale * dots + minimum * q_scale * query.sums[..., None]
        if query.minimum is not None and k_sums is not None:
            q_min = query.minimum[..., None]
            scores = scores + q_min * scale * k_sums[:, :, None, :] + fmt.k_partition * q_min * minimum
        self.approximation_s += perf_counter() - began
        return scores.sum(1)

    def _weigh_pages(self, fmt: HackFormat, p: Tensor, sealed: Codes) -> tuple[Tensor, Tensor]:
        """Eq. (4) for P·V per page: p [Hkv, R, P, Π] in 0..1 -> outputs [Hkv, R, P, D], weight sums [Hkv, R, P].

        Weights are summed after rounding, so an output is a convex combination of rows of V^.
        """
        p_min: Tensor | None = None
        if fmt.arithmetic is Arithmetic.SYMMETRIC:
            p_scale = torch.full_like(p[..., 0], 1.0 / P_LEVELS_SYMMETRIC)
            codes = torch.floor(p * P_LEVELS_SYMMETRIC + 0.5)
        else:
            p_min = p.amin(-1)
            p_scale = _nonzero((1.0 - p_min) / LEVELS_ASYMMETRIC)
            codes = torch.floor((p - p_min[..., None]) / p_scale[..., None] + 0.5)
        dots = (codes.transpose(1, 2) @ sealed.v).transpose(1, 2)  # [Hkv, R, P, D]
        began = perf_counter()
        sums = codes.sum(-1)
        v_min, v_scale = sealed.v_min[:, None], sealed.v_scale[:, None]
        outputs = p_scale[..., None] * (v_scale * dots + v_min * sums[..., None])
        weights = p_scale * sums
        if p_min is not None and sealed.v_sums is not None:
            low = p_min[..., None]
            outputs = outputs + low * v_scale * sealed.v_sums[:, None] + fmt.page_tokens * low * v_min
            weights = weights + fmt.page_tokens * p_min
        self.approximation_s += perf_counter() - began
        return outputs, weights

    def _unpack(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> Codes:
        """Bytes of a sequence's sealed pages to integers, with their metadata in FP32."""
        held = {name: plane[page_ids] for name, plane in pages.items()}
        k = unpack(held["k_codes"], fmt.k_bits, axis=-2).unflatten(-1, (fmt.k_groups, fmt.k_partition))
        v = unpack(held["v_codes"], fmt.v_bits, axis=-1)
        if fmt.arithmetic is Arithmetic.ASYMMETRIC and not fmt.stored_sums:
            began = perf_counter()
            held |= _sums(fmt, held)
            self.approximation_s += perf_counter() - began

        def k_meta(plane: Tensor) -> Tensor:
            return plane.float().permute(1, 3, 0, 2).flatten(2)  # [P, Hkv, Π, G] -> [Hkv, G, P·Π]

        def v_meta(plane: Tensor) -> Tensor:
            return plane.float().transpose(0, 1)

        sums = fmt.arithmetic is Arithmetic.ASYMMETRIC
        return Codes(
            k.float().permute(1, 3, 0, 2, 4).flatten(2, 3),
            k_meta(held["k_min"]),
            k_meta(held["k_scale"]),
            k_meta(held["k_sums"]) if sums else None,
            v.float().permute(1, 0, 3, 2),
            v_meta(held["v_min"]),
            v_meta(held["v_scale"]),
            v_meta(held["v_sums"]) if sums else None,
        )


def quantize_query(fmt: HackFormat, q: Tensor) -> Query:
    """Q [Hkv, R, D] FP32 to 8 bits per (row, head, partition), nearest. Its metadata never travels and stays FP32."""
    q = q.unflatten(-1, (fmt.k_groups, fmt.k_partition)).transpose(1, 2)  # [Hkv, G, R, Z]
    minimum: Tensor | None = None
    if fmt.arithmetic is Arithmetic.SYMMETRIC:
        scale = _nonzero(q.abs().amax(-1) / Q_LEVELS_SYMMETRIC)
        codes = torch.floor(q / scale[..., None] + 0.5).clamp(-Q_LEVELS_SYMMETRIC, Q_LEVELS_SYMMETRIC)
    else:
        minimum = q.amin(-1)
        scale = _nonzero((q.amax(-1) - minimum) / LEVELS_ASYMMETRIC)
        codes = torch.floor((q - minimum[..., None]) / scale[..., None] + 0.5).clamp(0, LEVELS_ASYMMETRIC) - INT8_OFFSET
        minimum = minimum + INT8_OFFSET * scale
    return Query(codes, scale, minimum, codes.sum(-1))


def create() -> HackKernels:
    """The reference runs wherever torch does."""
    return ReferenceKernels()


def _exact(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal softmax attention: q [n, Hq, D] at positions start.., k, v [start + n, Hkv, D] -> [n, Hq, D]."""
    n, total = q.shape[0], k.shape[0]
    visible = torch.arange(total, device=q.device)[None, :] <= start + torch.arange(n, device=q.device)[:, None]
    queries, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1).to(q.dtype)


def _group(q: Tensor, num_kv_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hkv, g·n, D] FP32, scaled by 1/sqrt(D): the query heads that share a KV head become its rows."""
    n, heads, dim = q.shape
    grouped = q.float().view(n, num_kv_heads, heads // num_kv_heads, dim).permute(1, 2, 0, 3)
    return grouped.flatten(1, 2) / math.sqrt(dim)


def _ungroup(out: Tensor, n: int) -> Tensor:
    """Inverse of `_group`, without the scale."""
    heads, rows, dim = out.shape
    return out.view(heads, rows // n, n, dim).permute(2, 0, 1, 3).flatten(1, 2)


def _rows(spans: Spans) -> list[tuple[int, int, int]]:
    return list(zip(spans.starts.tolist(), spans.counts.tolist(), spans.offsets.tolist(), strict=True))


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _fields(x: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    return x.codes, x.minimum, x.scale


def _resting_k(fmt: HackFormat, pages: HackPages, page_id: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first K rows of a page as (codes [n, Hkv, G, Z], minimum, scale [n, Hkv, G])."""
    codes = unpack(pages["k_codes"][page_id], fmt.k_bits, axis=-2).transpose(0, 1)[:rows]
    meta = (pages[name][page_id].transpose(0, 1)[:rows] for name in ("k_min", "k_scale"))
    minimum, scale = meta
    return codes.unflatten(-1, (fmt.k_groups, fmt.k_partition)), minimum, scale


def _sums(fmt: HackFormat, held: HackPages) -> HackPages:
    """Σ codes per partition, from packed codes [P, Hkv, ...]."""
    k = unpack(held["k_codes"], fmt.k_bits, axis=-2).unflatten(-1, (fmt.k_groups, fmt.k_partition))
    v = unpack(held["v_codes"], fmt.v_bits, axis=-1)
    return {
        "k_sums": k.sum(-1, dtype=torch.int32).to(sum_dtype(fmt.k_bits, fmt.k_partition)),
        "v_sums": v.sum(-1, dtype=torch.int32).to(sum_dtype(fmt.v_bits, fmt.page_tokens)),
    }
