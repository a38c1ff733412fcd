"""Records of pages of levels to planes in wire order and back, by the functions of `exchange.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.level_format import LevelFormat
from hack_kernels.triton.exchange import block_of_pages, empty_wire, move, pages_together
from hack_kernels.triton.exchange_codes import export_codes, install_codes, load_wire
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.level_layout import level_layout
from hack_kernels.triton.level_scales import scale_pointer


@triton.jit
def move_codes(wire, rest, index, present, INSTALL: tl.constexpr, TILE: tl.constexpr, OF_K: tl.constexpr):
    """Moves a plane of codes of K or V."""
    plane: tl.constexpr = TILE.rows * TILE.columns // TILE.fields
    at = wire + index * plane
    if INSTALL:
        install_codes(load_wire(at, present, TILE, OF_K), rest, present, TILE, OF_K)
    else:
        export_codes(rest, at, present, TILE, OF_K)


@triton.jit
def move_side(
    codes, high, scale, record, index, present, INSTALL: tl.constexpr, SIDE: tl.constexpr, OF_K: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Moves the planes of K or V."""
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    resting = scale_pointer(record + SIDE.scale, SIDE.narrow)
    move(scale + index * LAYOUT.page_tokens, resting, present, INSTALL, 1, LAYOUT, True)
    move_codes(codes, record + SIDE.codes, index, present, INSTALL, LOW, OF_K)
    if SIDE.split:
        move_codes(high, record + SIDE.high, index, present, INSTALL, TOP, OF_K)


@triton.jit(do_not_specialize=["count"])
def level_exchange_kernel(
    k_codes,
    k_high,
    k_scale,
    v_codes,
    v_high,
    v_scale,
    page_ids,
    records,
    count,
    page_stride,
    INSTALL: tl.constexpr,
    PAGES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Grid (blocks of PAGES pages, KV heads); wire planes are contiguous [heads, count, ...]."""
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    present, record, index = block_of_pages(page_ids, records, count, page_stride, PAGES, LAYOUT)
    move_side(k_codes, k_high, k_scale, record, index, present, INSTALL, K, True, LAYOUT)
    move_side(v_codes, v_high, v_scale, record, index, present, INSTALL, V, False, LAYOUT)


def install_levels(fmt: LevelFormat, pages: Planes, page_ids: Tensor, planes: Planes) -> None:
    """Planes [Hkv, P, *plane shape] in wire order into the records of `page_ids`; checks are the caller's."""
    wire = {name: plane.contiguous() for name, plane in planes.items()}
    level_exchange_launch(fmt, pages, page_ids, wire, installing=True).run()


def export_levels(fmt: LevelFormat, pages: Planes, page_ids: Tensor) -> Planes:
    """The records of `page_ids` as planes [Hkv, P, *plane shape] in wire order."""
    wire = empty_wire(fmt, pages, page_ids)
    if page_ids.numel():
        level_exchange_launch(fmt, pages, page_ids, wire, installing=False).run()
    return wire


def level_exchange_launch(
    fmt: LevelFormat, pages: Planes, page_ids: Tensor, wire: Planes, *, installing: bool
) -> Launch:
    """The launch of `install_levels` or `export_levels`; `wire` is contiguous. Planes that a format lacks are passed as
    the codes, never accessed."""
    records, layout, count = pages["k_codes"], level_layout(fmt), page_ids.numel()
    together, warps = pages_together(layout.k.low, layout.v.low, *([layout.k.top] if layout.k.split else []))
    arguments = {
        **{name: wire[name] for name in ("k_codes", "k_scale", "v_codes", "v_scale")},
        "k_high": wire.get("k_high", wire["k_codes"]),
        "v_high": wire.get("v_high", wire["v_codes"]),
        "page_ids": page_ids,
        "records": records,
        "count": count,
        "page_stride": records.stride(0),
        "INSTALL": installing,
        "PAGES": together,
        "LAYOUT": layout,
    }
    return Launch(level_exchange_kernel, (-(-count // together), records.shape[1]), arguments, warps)
