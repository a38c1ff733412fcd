"""Pages whose values are read one by one: small floating-point numbers, integer codes in groups, non-uniform levels,
Huffman codes, deltas against anchor rows."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.cpu.attention import attend
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.memory import zeroed_planes
from hack_kernels.cpu.rows import native_row_format
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.float_format import FloatFormat, Scaling
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.huffman_format import HuffmanFormat, Unit, books_of
from hack_kernels.nuq_format import NuqFormat, NuqTables, cos_sin_of, normal_poles, unrotated
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.wire_order import WireOrder
from hack_kernels.row_format import RowFormat

SCALINGS: Final = {Scaling.PAGE: 0, Scaling.POWER: 1, Scaling.TWOFOLD: 2}
UNITS: Final = {Unit.BLOCK: 0, Unit.CHANNEL: 1, Unit.TOKEN: 2}
SMALLEST_GROUP: Final = 16


class ReadCpu(WireOrder):
    """`PageKernels` for a `ReadFormat`: planes are moved as they are, everything else is C++."""

    served_by = "cpu"

    def __init__(self, fmt: ReadFormat, native: Any, native_format: Any) -> None:
        """`native` are the compiled kernels, `native_format` is `fmt` as they take it."""
        super().__init__(fmt, torch.device("cpu"))
        self.approximation_s = 0.0
        """Seconds spent on writing FP16 rows. A fused conversion has no time of its own."""
        self._fmt, self._native, self._native_format = fmt, native, native_format

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Zeroed planes, in huge pages where the system has them."""
        return zeroed_planes(formats, num_pages, num_kv_heads)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool."""
        check_seal(self._fmt, pool, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._native.seal(self._native_format, layer, pool.planes, *rows, pool.head_start)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Fused: values are converted in registers. Unfused: the pages become FP16 rows, which are attended to."""
        check_attention(self._fmt, pool, spans, rows)
        if self._fmt.fused:
            return attend(self._native, self._native_format, layer, pool, spans, rows)
        began = perf_counter()
        rows_format = native_row_format(RowFormat(self._fmt.head_dim, self._fmt.page_tokens))
        pool, spans = self._as_rows(pool, spans)
        self.approximation_s += perf_counter() - began
        return attend(self._native, rows_format, layer, pool, spans, rows)

    def _as_rows(self, pool: Pool, spans: Spans) -> tuple[Pool, Spans]:
        """The pages that `spans` read, as FP16 rows in a pool of their own, and spans with their numbers there."""
        pages = (spans.starts + spans.counts - 1) // self._fmt.page_tokens
        read = torch.arange(spans.table.shape[-1]) < pages[:, None]
        read = read if spans.table.dim() == 2 else read[:, None].expand_as(spans.table)
        ids, places = torch.unique(spans.table[read], return_inverse=True)
        table = torch.zeros_like(spans.table)
        table[read] = places
        shape = (max(1, ids.numel()), pool.num_kv_heads, self._fmt.page_tokens, self._fmt.head_dim)
        k, v = (torch.empty(shape, dtype=torch.float16) for _ in range(2))
        if ids.numel():
            self._native.read(self._native_format, pool.planes, ids, k, v, pool.head_start)
        as_rows = Pool({"k": k, "v": v}, pool.open_k, pool.open_v, pool.head_start, pool.window)
        return as_rows, Spans(spans.starts, spans.counts, spans.offsets, table, spans.slots)


class NuqCpu(ReadCpu):
    """Implements `NuqKernels`: keys are rotated back in torch before C++ seals them, and rotated again in C++."""

    def __init__(self, fmt: NuqFormat, native: Any) -> None:
        super().__init__(fmt, native, None if fmt.calibrated else native_nuq_format(fmt, None))
        self.fmt = fmt
        self._frequencies: Tensor | None = None

    def calibrate(self, tables: NuqTables) -> None:
        """Keep the tables for sealing and attention."""
        tables.check(self.fmt)
        self._frequencies, self._native_format = tables.frequencies, native_nuq_format(self.fmt, tables)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool."""
        if self._frequencies is not None:
            check_seal(self.fmt, pool, page_ids, starts, k, v)
            k = unrotated(k, starts, self._frequencies)
        super().seal(layer, pool, page_ids, starts, k, v)


def for_floats(fmt: FloatFormat, native: Any) -> ReadCpu | None:
    """None for a shape that `csrc/rows.h` does not take."""
    return ReadCpu(fmt, native, native_float_format(fmt)) if _takes(fmt) else None


def for_groups(fmt: GroupFormat, native: Any) -> ReadCpu | None:
    """None for a shape that `csrc/rows.h` does not take, or groups that vectors do not divide."""
    return ReadCpu(fmt, native, native_group_format(fmt)) if _takes(fmt) and _takes_groups(fmt) else None


def for_levels(fmt: NuqFormat, native: Any) -> NuqCpu | None:
    """None for a shape that `csrc/rows.h` does not take."""
    return NuqCpu(fmt, native) if _takes(fmt) else None


def for_huffman(fmt: HuffmanFormat, native: Any) -> ReadCpu | None:
    """None for a shape that `csrc/rows.h` does not take."""
    return ReadCpu(fmt, native, native_huffman_format(fmt)) if _takes(fmt) else None


def for_deltas(fmt: DeltaFormat, native: Any) -> ReadCpu | None:
    """None for a shape that `csrc/rows.h` does not take."""
    return ReadCpu(fmt, native, native_delta_format(fmt)) if _takes(fmt) else None


def native_float_format(fmt: FloatFormat) -> Any:
    """`fmt` for C++."""
    return compiled().float_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        exponent_bits=fmt.element.exponent_bits,
        mantissa_bits=fmt.element.mantissa_bits,
        largest=fmt.element.largest,
        scaling=SCALINGS[fmt.scaling],
        block=fmt.block,
    )


def native_group_format(fmt: GroupFormat) -> Any:
    """`fmt` for C++."""
    return compiled().group_format(
        head_dim=fmt.head_dim, page_tokens=fmt.page_tokens, k=_grouped(fmt.k), v=_grouped(fmt.v)
    )


def native_nuq_format(fmt: NuqFormat, tables: NuqTables | None) -> Any:
    """`fmt` for C++, which borrows the tensors of `tables` and keeps them alive."""
    poles: dict[str, Any]
    if tables is None:
        poles = {f"{name}_poles": normal_poles(fmt.side(name).bits) for name in ("k", "v")}
        known = dict[str, Tensor | None](k_range=None, row_turns=None, frequencies=None)
    else:
        poles = {"k_poles": tables.k_poles.tolist(), "v_poles": tables.v_poles.tolist()}
        cos_sin = torch.cat(cos_sin_of(torch.arange(fmt.page_tokens), tables.frequencies), -1)
        known = {
            "k_range": tables.k_range.contiguous(),
            "row_turns": cos_sin,
            "frequencies": tables.frequencies.contiguous(),
        }
    return compiled().nuq_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        k_bits=fmt.k_bits,
        v_bits=fmt.v_bits,
        **poles,
        **known,
    )


def native_huffman_format(fmt: HuffmanFormat) -> Any:
    """`fmt` for C++, which borrows the tensors of its books and keeps them alive."""

    def side(name: str) -> tuple[int, int, tuple[float, ...], Tensor, Tensor]:
        of = fmt.side(name)
        books = books_of(of.symbols)
        return UNITS[of.unit], fmt.room_bits(name), of.rungs, books.codes, books.lookup

    return compiled().huffman_format(head_dim=fmt.head_dim, page_tokens=fmt.page_tokens, k=side("k"), v=side("v"))


def native_delta_format(fmt: DeltaFormat) -> Any:
    """`fmt` for C++."""
    return compiled().delta_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        group=fmt.group,
        k=(fmt.k.bits, fmt.k.centre),
        v=(fmt.v.bits, fmt.v.centre),
    )


def _grouped(side: Grouping) -> tuple[int, bool, int, int]:
    return side.bits, side.by_channel, side.group, side.centre


def _takes(fmt: ReadFormat) -> bool:
    return fmt.page_tokens % 32 == 0 and fmt.page_tokens <= 128 and fmt.head_dim % 32 == 0 and fmt.head_dim <= 256


def _takes_groups(fmt: GroupFormat) -> bool:
    def takes(side: Grouping) -> bool:
        whole_row = not side.by_channel and side.group == fmt.head_dim
        return whole_row or (side.group >= SMALLEST_GROUP and side.group & (side.group - 1) == 0)

    return takes(fmt.k) and takes(fmt.v) and not (fmt.k.bits == 5 and fmt.k.by_channel)
