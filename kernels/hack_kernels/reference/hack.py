"""The definition of homomorphic attention: rows are quantized once, and Eq. (4) computes on their codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_requantize, check_seal
from hack_kernels.hack_format import SUM_PLANES, Arithmetic, HackFormat, OpenPage
from hack_kernels.philox import Coordinates
from hack_kernels.quantize import Quantized, pack, quantize_k, quantize_v, unpack
from hack_kernels.reference.eq4 import CodeArithmetic, KCodes, Query, VCodes, count_sums, quantize_query
from hack_kernels.reference.ragged import SequenceRows, group_heads, held_pages, places, sequences, ungroup_heads
from hack_kernels.reference.wire_order import WireOrder

FP16_MAX = 65504.0  # the scale is rounded up, so x^ may pass the largest value by less than a step


class HackReference(WireOrder):
    """Implements `HackKernels`."""

    def __init__(self, fmt: HackFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self.arithmetic = CodeArithmetic(fmt)

    @property
    def approximation_s(self) -> float:
        """Seconds spent on the correction terms of Eq. (4)."""
        return self.arithmetic.approximation_s

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool, one page after another."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        steps = torch.arange(self.fmt.page_tokens, device=self.device)
        for page_id, start, k_page, v_page in zip(page_ids.tolist(), starts.tolist(), k, v, strict=True):
            where = Coordinates(layer, pool.head_start, start + steps)
            k_codes = quantize_k(self.fmt, where, k_page.transpose(0, 1))
            v_codes = quantize_v(self.fmt, where, v_page.transpose(0, 1))
            self._store(pool, page_id, k_codes, v_codes)

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Ablation HACK/RQE: the requantization that the paper eliminates. Page after page."""
        check_requantize(self.fmt, pool, spans, k, v)
        pi = self.fmt.page_tokens
        for b, (start, count, offset) in enumerate(places(spans)):
            for page in range(start // pi, (start + count - 1) // pi + 1):
                begin, stop = max(start, page * pi), min(start + count, (page + 1) * pi)
                rows = slice(offset + begin - start, offset + stop - start)
                numbers = page * pi + torch.arange(stop - page * pi, device=self.device)
                where = Coordinates(layer, pool.head_start, numbers)
                self._requantize_page(pool, int(spans.table[b, page]), where, k[rows], v[rows])

    def _requantize_page(self, pool: Pool, page_id: int, where: Coordinates, k: Tensor, v: Tensor) -> None:
        """`where` numbers all rows of the page, new ones included; k, v [n, Hkv, D] are the new rows, the last n."""
        fmt, planes = self.fmt, pool.planes
        old = where.rows.numel() - k.shape[0]
        resting = Quantized(
            unpack(planes["v_codes"][page_id], fmt.v_bits, axis=-1),
            planes["v_min"][page_id],
            planes["v_scale"][page_id],
        )
        kept = resting.dequantize()[..., :old].permute(2, 0, 1).clamp(max=FP16_MAX).to(torch.float16)
        v_codes = quantize_v(fmt, where, torch.cat((kept, v)))
        k_new = quantize_k(fmt, Coordinates(where.layer, where.head_start, where.rows[old:]), k)
        k_old = _resting_k(fmt, planes, page_id, old)
        k_codes = Quantized(*(torch.cat((a, b)) for a, b in zip(k_old.fields(), k_new.fields(), strict=True)))
        self._store(pool, page_id, k_codes, v_codes)

    def _store(self, pool: Pool, page_id: int, k: Quantized, v: Quantized) -> None:
        """Pack one page, whole or partly filled: k codes [n, Hkv, G, Z], v codes [Hkv, D, n], n <= Π."""
        fmt, planes = self.fmt, pool.planes
        missing = fmt.page_tokens - k.codes.shape[0]
        k_rows = pad(k.codes.flatten(2).permute(1, 0, 2), (0, 0, 0, missing))  # [Hkv, Π, D]
        v_rows = pad(v.codes, (0, missing))
        planes["k_codes"][page_id] = pack(k_rows, fmt.k_bits, axis=-2)
        planes["v_codes"][page_id] = pack(v_rows, fmt.v_bits, axis=-1)
        for name, rows in (("k_min", k.minimum), ("k_scale", k.scale)):
            planes[name][page_id] = pad(rows.transpose(0, 1), (0, 0, 0, missing))
        planes["v_min"][page_id], planes["v_scale"][page_id] = v.minimum, v.scale
        if fmt.sums:
            ids = torch.tensor([page_id])
            for name, sums in count_sums(fmt, {name: plane[ids] for name, plane in planes.items()}).items():
                planes[name][ids] = sums

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Copy; sums that did not travel are counted."""
        super().install(pool, page_ids, planes)
        if self.fmt.sums and SUM_PLANES[0] not in planes:
            codes = {name: pool.planes[name][page_ids] for name in ("k_codes", "v_codes")}
            for name, sums in count_sums(self.fmt, codes).items():
                pool.planes[name][page_ids] = sums

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Sequence after sequence, and in each the queries of one page after another."""
        check_attention(self.fmt, pool, spans, rows)
        out = torch.empty_like(rows.q)
        for part in sequences(pool, spans, rows):
            out[part.rows] = self._attend_sequence(layer, pool, part)
        return out

    def _attend_sequence(self, layer: int, pool: Pool, part: SequenceRows) -> Tensor:
        pi, start, end = self.fmt.page_tokens, part.start, part.start + part.q.shape[0]
        first, last = start // pi, (end - 1) // pi
        sees_own_codes = self.fmt.open_page is OpenPage.REQUANTIZE
        count = last + sees_own_codes
        held = {name: held_pages(plane, part.table, count) for name, plane in pool.planes.items()}
        k, v = self.arithmetic.unpack(held)
        blocks = []
        for page in range(first, last + 1):
            begin, stop = max(start, page * pi), min(end, (page + 1) * pi)
            queries = _Queries(
                group_heads(part.q[begin - start : stop - start], part.own_k.shape[1]),
                torch.arange(begin, stop, device=self.device),
            )
            pages = page + sees_own_codes
            own = slice((page - first) * pi, 0 if sees_own_codes else stop - first * pi)
            own_rows = page * pi + torch.arange(part.own_k[own].shape[0], device=self.device)
            where = Coordinates(layer, pool.head_start, own_rows)
            block = self._attend_page(
                queries, k.first(pages * pi), v.first(pages), where, part.own_k[own], part.own_v[own]
            )
            blocks.append(ungroup_heads(block, stop - begin))
        return torch.cat(blocks).to(part.q.dtype)

    def _attend_page(
        self, queries: _Queries, k: KCodes, v: VCodes, where: Coordinates, own_k: Tensor, own_v: Tensor
    ) -> Tensor:
        """Queries of one page: sealed pages as codes, own rows by the open-page rule, merged. [Hkv, g·n, D] FP32."""
        pi, numbers = self.fmt.page_tokens, queries.row_numbers()
        query = quantize_query(self.fmt, queries.q)
        num_pages = v.codes.shape[1]
        scores = self.arithmetic.scores(query, k)
        scores = scores.masked_fill(
            torch.arange(num_pages * pi, device=self.device)[None, :] > numbers[:, None], -math.inf
        )
        scores = scores.unflatten(-1, (num_pages, pi))
        own = self._own_scores(where, query, queries.q, own_k)
        own = own.masked_fill(where.rows[None, :] > numbers[:, None], -math.inf)

        page_max = scores.amax(-1)  # [Hkv, R, P]
        overall = torch.cat((page_max, own), -1).amax(-1)  # [Hkv, R]
        outputs, weights = self.arithmetic.weigh_pages(torch.exp(scores - page_max[..., None]), v)
        beta = torch.exp(page_max - overall[..., None])
        p_own = torch.exp(own - overall[..., None])
        numerator = (beta[..., None] * outputs).sum(2) + p_own @ own_v.float().transpose(0, 1)
        return numerator / ((beta * weights).sum(-1) + p_own.sum(-1))[..., None]

    def _own_scores(self, where: Coordinates, query: Query, q: Tensor, own_k: Tensor) -> Tensor:
        """Scores [Hkv, R, m] against the query's own page: exact, or on codes that are made here."""
        if self.fmt.open_page is OpenPage.EXACT:
            return q @ own_k.float().permute(1, 2, 0)
        codes = quantize_k(self.fmt, where, own_k)
        integers = codes.codes.float().permute(1, 2, 0, 3)
        minimum, scale = (x.float().permute(1, 2, 0) for x in (codes.minimum, codes.scale))
        sums = integers.sum(-1) if self.fmt.arithmetic is Arithmetic.ASYMMETRIC else None
        return self.arithmetic.scores(query, KCodes(integers, minimum, scale, sums))


@dataclass(frozen=True, slots=True)
class _Queries:
    """Queries that lie in one page."""

    q: Tensor
    """[Hkv, g·n, D] FP32, scaled."""
    rows: Tensor
    """[n] int64: the numbers of their rows."""

    def row_numbers(self) -> Tensor:
        """[g·n] int64: the number of each row of `q`."""
        return self.rows.repeat(self.q.shape[1] // self.rows.numel())


def _resting_k(fmt: HackFormat, planes: Planes, page_id: int, rows: int) -> Quantized:
    """The first K rows of a page: codes [n, Hkv, G, Z], minimum and scale [n, Hkv, G]."""
    codes = unpack(planes["k_codes"][page_id], fmt.k_bits, axis=-2).transpose(0, 1)[:rows]
    minimum, scale = (planes[name][page_id].transpose(0, 1)[:rows] for name in ("k_min", "k_scale"))
    return Quantized(codes.unflatten(-1, (fmt.k_groups, fmt.k_partition)), minimum, scale)
