"""The definition of `hack_kernels.level_format`: how a row becomes codes, and attention on the codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.level_format import FITS, STEP, TINY, LevelFormat, code_planes
from hack_kernels.quantize import pack, unpack
from hack_kernels.reference.ragged import SequenceRows, group_heads, held_pages, sequences, ungroup_heads
from hack_kernels.reference.wire_order import WireOrder

Q_LEVELS = 127
P_LEVELS = 127
LARGEST = 65504.0  # of FP16


class LevelReference(WireOrder):
    """Implements `LevelKernels`."""

    def __init__(self, fmt: LevelFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self.approximation_s = 0.0  # the corrections are one subtraction in each product
        self._feedback = dict[int, Tensor]()

    def set_feedback(self, layer: int, gains: Tensor) -> None:
        """Keep the gains for the seals of `layer`."""
        check_feedback(self.fmt, gains)
        self._feedback[layer] = gains.to(self.device)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """All pages at once: rows are independent of each other."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        gains = self._feedback.get(layer)
        if gains is not None:
            gains = gains[pool.head_start : pool.head_start + pool.num_kv_heads, None]
        k_codes, k_scale = quantize_rows(k, self.fmt.k_bits, gains)
        v_codes, v_scale = quantize_rows(v, self.fmt.v_bits)
        planes = {
            **pack_codes("k", self.fmt.k_bits, k_codes),
            "k_scale": k_scale,
            **pack_codes("v", self.fmt.v_bits, v_codes),
            "v_scale": v_scale,
        }
        for name, plane in planes.items():
            pool.planes[name][page_ids] = plane

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Sequence after sequence, and in each the queries of one page after another."""
        check_attention(self.fmt, pool, spans, rows)
        out = torch.empty_like(rows.q)
        for part in sequences(pool, spans, rows):
            out[part.rows] = self._attend_sequence(pool, part)
        return out

    def _attend_sequence(self, pool: Pool, part: SequenceRows) -> Tensor:
        pi, start, end = self.fmt.page_tokens, part.start, part.start + part.q.shape[0]
        first, last = start // pi, (end - 1) // pi
        held = {name: held_pages(plane, part.table, last) for name, plane in pool.planes.items()}
        sealed = _unpack(self.fmt, held)
        blocks = []
        for page in range(first, last + 1):
            begin, stop = max(start, page * pi), min(end, (page + 1) * pi)
            own = slice((page - first) * pi, stop - first * pi)
            q = group_heads(part.q[begin - start : stop - start], part.own_k.shape[1])
            numbers = torch.arange(begin, stop, device=self.device).repeat(q.shape[1] // (stop - begin))
            unseen = page * pi + torch.arange(stop - page * pi, device=self.device)[None, :] > numbers[:, None]
            own_k, own_v = (x[own].float().transpose(0, 1) for x in (part.own_k, part.own_v))
            block = self._attend_page(q, sealed.first(page), own_k, own_v, unseen)
            blocks.append(ungroup_heads(block, stop - begin))
        return torch.cat(blocks).to(part.q.dtype)

    def _attend_page(self, q: Tensor, sealed: _Sealed, own_k: Tensor, own_v: Tensor, unseen: Tensor) -> Tensor:
        """Queries q [Hkv, R, D] of one page over the sealed pages before it, as codes, and over its rows [Hkv, m, D],
        exactly, but where `unseen` [R, m] is set; merged. [Hkv, R, D] FP32."""
        own = (q @ own_k.mT).masked_fill(unseen, -torch.inf)
        scores = level_scores(q, self.fmt.k_bits, sealed.k_codes, sealed.k_scale)  # [Hkv, R, P, Π]
        page_max = scores.amax(-1)
        overall = torch.cat((page_max, own), -1).amax(-1)  # [Hkv, R]
        p = torch.exp(scores - page_max[..., None])
        outputs = weigh_levels(p, self.fmt.v_bits, sealed.v_codes, sealed.v_scale)
        beta = torch.exp(page_max - overall[..., None])
        p_own = torch.exp(own - overall[..., None])
        numerator = (beta[..., None] * outputs).sum(2) + p_own @ own_v
        return numerator / ((beta * p.sum(-1)).sum(-1) + p_own.sum(-1))[..., None]


class _Sealed(NamedTuple):
    """P pages, unpacked to FP32."""

    k_codes: Tensor  # [Hkv, P, Π, D]
    k_scale: Tensor  # [Hkv, P, Π]
    v_codes: Tensor  # [Hkv, P, Π, D]
    v_scale: Tensor  # [Hkv, P, Π]

    def first(self, pages: int) -> _Sealed:
        """The leading pages only."""
        return _Sealed(*(x[:, :pages] for x in self))


def check_feedback(fmt: LevelFormat, gains: Tensor) -> None:
    """Gains [heads, D, D] float32. Raises `ValueError`."""
    if gains.dim() != 3 or gains.shape[1:] != (fmt.head_dim, fmt.head_dim) or gains.dtype is not torch.float32:
        expected = f"[heads, {fmt.head_dim}, {fmt.head_dim}] torch.float32"
        raise ValueError(f"gains is {list(gains.shape)} {gains.dtype}; expected {expected}")


def quantize_rows(x: Tensor, bits: int, gains: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] -> codes uint8 [..., D] and scales FP16 [...].

    With `gains`, whose shape broadcasts to [..., D, D], channels later in the row feed their errors to those before.
    """
    rows, z = x.float(), top_level(bits)
    scale = _fit_scale(rows, bits)
    half = scale.clamp(max=LARGEST).to(torch.float16)
    y = rows * (1 / half.float())[..., None]
    levels = to_levels(y, z) if gains is None else _feed_back(y, z, gains)
    return (levels + z).to(torch.uint8), half


def _fit_scale(rows: Tensor, bits: int) -> Tensor:
    """The scale [...] FP32 of each row by alternate least squares; products and sums are operations of their own."""
    z, squares = top_level(bits), sum_in_order(rows * rows)
    scale = torch.sqrt(squares / torch.full_like(squares, rows.shape[-1])) * torch.full_like(squares, STEP[bits])
    scale = scale.clamp(min=TINY)
    for _ in range(FITS):
        levels = to_levels(rows * (1 / scale)[..., None], z)
        scale = (sum_in_order(levels * rows) / sum_in_order(levels * levels)).clamp(min=TINY)
    return scale


def _feed_back(y: Tensor, z: float, gains: Tensor) -> Tensor:
    """Levels of y [..., D], the last channel first; its error then goes to all channels before it."""
    t, levels = y.clone(), torch.empty_like(y)
    for d in range(y.shape[-1] - 1, -1, -1):
        levels[..., d] = to_levels(t[..., d], z)
        error = y[..., d] - levels[..., d]
        t[..., :d] += error[..., None] * gains[..., :d, d]
    return levels


def to_levels(t: Tensor, z: float) -> Tensor:
    """The nearest of ±1/2, ±3/2, .., ±z."""
    return (torch.floor(t) + 0.5).clamp(-z, z)


def top_level(bits: int) -> float:
    """z: the level of the largest code, and what code 0 lies below zero."""
    return int(2**bits - 1) / 2


def sum_in_order(terms: Tensor) -> Tensor:
    """Σ over the last axis, its first element first, one addition at a time."""
    channels = terms.movedim(-1, 0).contiguous()
    total = channels[0]
    for d in range(1, channels.shape[0]):
        total = total + channels[d]
    return total


def pack_codes(name: str, bits: int, codes: Tensor) -> Planes:
    """Codes uint8 [..., Π, D] of K ("k") or V ("v") -> their planes [..., *plane shape]."""
    axis, planes, shift = -2 if name == "k" else -1, Planes(), 0
    laid = codes if name == "k" else codes.mT
    for plane, width in code_planes(name, bits):
        planes[plane] = pack((laid >> shift) & (2**width - 1), width, axis)
        shift += width
    return planes


def unpack_codes(name: str, bits: int, planes: Planes) -> Tensor:
    """Inverse of `pack_codes`; `planes` may hold others beside."""
    axis, shift, parts = -2 if name == "k" else -1, 0, list[Tensor]()
    for plane, width in code_planes(name, bits):
        parts.append(unpack(planes[plane], width, axis) << shift)
        shift += width
    codes = torch.stack(parts).sum(0, dtype=torch.uint8)
    return codes if name == "k" else codes.mT


def dequantize(bits: int, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x^ = s·(c - z) for codes [..., D] and scales [...]. Serves tests and measurements; attention never calls it."""
    return scale.to(dtype)[..., None] * (codes.to(dtype) - top_level(bits))


def level_scores(q: Tensor, bits: int, codes: Tensor, scale: Tensor) -> Tensor:
    """Scores [Hkv, R, P, Π] of queries q [Hkv, R, D] FP32, scaled, on K's codes [Hkv, P, Π, D], scales [Hkv, P, Π].

    Σ q'c and z Σ q' are multiples of 1/2 below 2^23, which FP32 holds exactly in any order of summation.
    """
    query, q_scale = quantize_query(q)
    dots = torch.einsum("hrd,hptd->hrpt", query, codes)
    corrected = dots - (top_level(bits) * query.sum(-1))[..., None, None]
    return q_scale[..., None, None] * scale[:, None] * corrected


def quantize_query(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] FP32 -> integers in -127..127, FP32, and their scales [...]."""
    scale = q.abs().amax(-1) / Q_LEVELS
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.floor(q / scale[..., None] + 0.5).clamp(-Q_LEVELS, Q_LEVELS), scale


def weigh_levels(p: Tensor, bits: int, codes: Tensor, scale: Tensor) -> Tensor:
    """Σ p_t v^_t of each page, [Hkv, R, P, D], for p [Hkv, R, P, Π], V's codes [Hkv, P, Π, D], scales [Hkv, P, Π].

    Weights p_t s_t are rounded to 0..127, to nearest even, relative to the largest of their page.
    """
    w = p * scale[:, None]
    largest = w.amax(-1, keepdim=True)
    weights = torch.round(w * P_LEVELS / largest)
    dots = torch.einsum("hrpt,hptd->hrpd", weights, codes)
    return largest / P_LEVELS * (dots - top_level(bits) * weights.sum(-1, keepdim=True))


def _unpack(fmt: LevelFormat, held: Planes) -> _Sealed:
    """A sequence's sealed pages, planes [P, Hkv, ...] in wire order."""
    return _Sealed(
        *(
            x.transpose(0, 1).float()
            for x in (
                unpack_codes("k", fmt.k_bits, held),
                held["k_scale"],
                unpack_codes("v", fmt.v_bits, held),
                held["v_scale"],
            )
        )
    )
