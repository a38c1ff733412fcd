"""The definition of `hack_kernels.level_format`: how a row becomes codes, and attention on the codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.level_format import (
    BYTE_SHIFT,
    FITS,
    LEAST_BYTE,
    MOST_BYTE,
    REFITS,
    STEP,
    STRETCH,
    TINY,
    Feedback,
    LevelFormat,
    Scales,
    code_planes,
)
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
        self._feedback = dict[int, Feedback]()

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        """Keep the feedback for seals of `layer`."""
        feedback.check(self.fmt.head_dim)
        self._feedback[layer] = feedback.to(self.device)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize all pages at once: rows are independent of each other."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        feedback = self._feedback.get(layer)
        if feedback is not None:
            feedback = feedback.heads(pool.head_start, pool.num_kv_heads)
        scales = self.fmt.scales
        k_codes, k_scale = quantize_rows(k, self.fmt.k_bits, feedback, scales)
        v_codes, v_scale = quantize_rows(v, self.fmt.v_bits, scales=scales)
        planes = {
            **pack_codes("k", self.fmt.k_bits, k_codes),
            "k_scale": pack_scales(k_scale, scales),
            **pack_codes("v", self.fmt.v_bits, v_codes),
            "v_scale": pack_scales(v_scale, scales),
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
            q = group_heads(part.q[begin - start : stop - start], part.own_k.shape[1])
            numbers = torch.arange(begin, stop, device=self.device).repeat(q.shape[1] // (stop - begin))
            exact = self._exact_rows(part, page, stop)
            unseen = exact.numbers[None, :] > numbers[:, None]
            block = self._attend_page(q, sealed.part(self.fmt.window.coded(page)), exact.k, exact.v, unseen)
            blocks.append(ungroup_heads(block, stop - begin))
        return torch.cat(blocks).to(part.q.dtype)

    def _exact_rows(self, part: SequenceRows, page: int, stop: int) -> _Exact:
        """The rows that queries of `page` see exactly, up to row `stop`."""
        pi, first = self.fmt.page_tokens, part.start // self.fmt.page_tokens
        pages = (*self.fmt.window.earlier(page), page)
        found = []
        for own, slot in ((part.own_k, part.slot_k), (part.own_v, part.slot_v)):
            rows = []
            for g in pages:
                source, at = (own, g - first) if g >= first else (slot, self.fmt.window.place(g))
                rows.append(source[at * pi :][: min(pi, stop - g * pi)])
            found.append(torch.cat(rows).float().transpose(0, 1))
        numbers = torch.cat([torch.arange(g * pi, min((g + 1) * pi, stop)) for g in pages]).to(self.device)
        return _Exact(found[0], found[1], numbers)

    def _attend_page(self, q: Tensor, sealed: _Sealed, exact_k: Tensor, exact_v: Tensor, unseen: Tensor) -> Tensor:
        """Attention of the queries q [Hkv, R, D] of one page, [Hkv, R, D] FP32. They see sealed pages as codes, and the
        rows [Hkv, m, D] exactly, except where `unseen` [R, m] is set. Both parts share one softmax."""
        own = (q @ exact_k.mT).masked_fill(unseen, -torch.inf)
        scores = level_scores(q, self.fmt.k_bits, sealed.k_codes, sealed.k_scale)  # [Hkv, R, P, Π]
        page_max = scores.amax(-1)
        overall = torch.cat((page_max, own), -1).amax(-1)  # [Hkv, R]
        p = torch.exp(scores - page_max[..., None])
        outputs = weigh_levels(p, self.fmt.v_bits, sealed.v_codes, sealed.v_scale)
        beta = torch.exp(page_max - overall[..., None])
        p_own = torch.exp(own - overall[..., None])
        numerator = (beta[..., None] * outputs).sum(2) + p_own @ exact_v
        return numerator / ((beta * p.sum(-1)).sum(-1) + p_own.sum(-1))[..., None]


class _Sealed(NamedTuple):
    """P pages, unpacked to FP32."""

    k_codes: Tensor  # [Hkv, P, Π, D]
    k_scale: Tensor  # [Hkv, P, Π]
    v_codes: Tensor  # [Hkv, P, Π, D]
    v_scale: Tensor  # [Hkv, P, Π]

    def part(self, pages: range) -> _Sealed:
        """The pages `pages` only."""
        return _Sealed(*(x[:, pages.start : pages.stop] for x in self))


class _Exact(NamedTuple):
    """FP16 rows, in FP32."""

    k: Tensor  # [Hkv, m, D]
    v: Tensor  # [Hkv, m, D]
    numbers: Tensor  # [m] int64


def quantize_rows(
    x: Tensor, bits: int, feedback: Feedback | None = None, scales: Scales = Scales.FP16
) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] -> codes uint8 [..., D] and scales FP16 [...], rounded as `scales` stores them. With `feedback`,
    x is [..., heads, Π, D]."""
    rows, z = x.float(), top_level(bits)
    scale = _fit_scale(rows, bits)
    if feedback is None:
        scale = _stored(scale, scales)
        levels = to_levels(rows * (1 / scale)[..., None], z)
    else:
        scale = _stored(scale * torch.full_like(scale, STRETCH[bits]), scales)
        levels, scale = _feed_back(rows, scale, z, feedback, scales)
    return (levels + z).to(torch.uint8), scale.to(torch.float16)


def _stored(scale: Tensor, scales: Scales) -> Tensor:
    """A scale rounded to its stored form, FP32."""
    half = scale.clamp(TINY, LARGEST).to(torch.float16)
    return unpack_scales(pack_scales(half, scales), scales).float()


def pack_scales(scale: Tensor, scales: Scales) -> Tensor:
    """Positive scales FP16 -> their plane."""
    if scales is Scales.FP16:
        return scale
    bits = scale.view(torch.int16).to(torch.int32)
    odd = (bits >> BYTE_SHIFT) & 1
    rounded: Tensor = (bits + (2 ** (BYTE_SHIFT - 1) - 1) + odd) >> BYTE_SHIFT
    return rounded.clamp(LEAST_BYTE, MOST_BYTE).to(torch.uint8)


def unpack_scales(plane: Tensor, scales: Scales) -> Tensor:
    """Inverse of `pack_scales`, FP16."""
    if scales is Scales.FP16:
        return plane
    bits: Tensor = plane.to(torch.int16) << BYTE_SHIFT
    return bits.view(torch.float16)


def _fit_scale(rows: Tensor, bits: int) -> Tensor:
    """The scale [...] FP32 of each row by alternate least squares; products and sums are operations of their own."""
    z, squares = top_level(bits), sum_in_order(rows * rows)
    scale = torch.sqrt(squares / torch.full_like(squares, rows.shape[-1])) * torch.full_like(squares, STEP[bits])
    scale = scale.clamp(min=TINY)
    for _ in range(FITS):
        levels = to_levels(rows * (1 / scale)[..., None], z)
        scale = (sum_in_order(levels * rows) / sum_in_order(levels * levels)).clamp(min=TINY)
    return scale


def _feed_back(rows: Tensor, scale: Tensor, z: float, feedback: Feedback, scales: Scales) -> tuple[Tensor, Tensor]:
    """Levels [..., D] and scales [...], FP32, of rows [..., heads, Π, D] whose scales before feedback are `scale`."""
    gains, weights = feedback.gains[:, None], feedback.weights[:, None]
    felt = _felt_rows(rows, gains)
    for _ in range(REFITS):
        _, felt_levels = _levels_under(felt, scale, z, gains)
        weighted = weights * felt_levels
        products, squares = ((weighted * x).flip(-1) for x in (felt, felt_levels))
        scale = _stored(sum_in_order(products) / sum_in_order(squares), scales)
    return _levels_under(felt, scale, z, gains)[0], scale


def _felt_rows(rows: Tensor, gains: Tensor) -> Tensor:
    """b = Gx of rows [..., D]."""
    felt = torch.zeros_like(rows)
    for i in range(rows.shape[-1] - 1, -1, -1):
        felt[..., :i] += rows[..., i, None] * gains[..., :i, i]
        felt[..., i] += rows[..., i]
    return felt


def _levels_under(felt: Tensor, scale: Tensor, z: float, gains: Tensor) -> tuple[Tensor, Tensor]:
    """Levels l [..., D] of rows, and Gl, for scales [...]. `felt` is the rows' b."""
    wanted, levels, felt_levels = felt * (1 / scale)[..., None], torch.zeros_like(felt), torch.zeros_like(felt)
    for d in range(felt.shape[-1] - 1, -1, -1):
        levels[..., d] = to_levels(wanted[..., d] - felt_levels[..., d], z)
        felt_levels[..., d] += levels[..., d]
        felt_levels[..., :d] += levels[..., d, None] * gains[..., :d, d]
    return levels, felt_levels


def to_levels(t: Tensor, z: float) -> Tensor:
    """The nearest of ±1/2, ±3/2, .., ±z."""
    return (torch.floor(t) + 0.5).clamp(-z, z)


def top_level(bits: int) -> float:
    """z: the level of the largest code. The level of code 0 is -z."""
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
    """Inverse of `pack_codes`. `planes` may hold other planes too."""
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
                unpack_scales(held["k_scale"], fmt.scales),
                unpack_codes("v", fmt.v_bits, held),
                unpack_scales(held["v_scale"], fmt.scales),
            )
        )
    )
