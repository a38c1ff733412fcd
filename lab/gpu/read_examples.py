"""Launches of the kernels for pages whose values are read one by one, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from hack_kernels.base import Pool
from hack_kernels.delta_format import DeltaFormat, DeltaSide
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.hack_format import HackFormat
from hack_kernels.huffman_format import HuffmanFormat, HuffmanSide, Unit
from hack_kernels.nuq_format import NuqFormat, NuqTables, normal_poles
from hack_kernels.triton.deltas import DeltaTriton
from hack_kernels.triton.float_query import ROWS_AT_ONCE
from hack_kernels.triton.float_seal import float_seal_launch
from hack_kernels.triton.floats import FloatTriton
from hack_kernels.triton.group_seal import group_seal_launch
from hack_kernels.triton.groups import GroupTriton
from hack_kernels.triton.huffman import HuffmanTriton
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.nuq import NuqTriton
from hack_kernels.triton.reading import InRecords

from lab.gpu.example import KV_HEADS, TOKENS, Example, empty, one_step, pool_of

META: Final = torch.device("meta")


def decoding(kernels: type[InRecords], fmt: Any, name: str, group: int) -> Example:
    """Decode; shapes are as in `examples.decode`."""
    spans, q, out, workspace = one_step(fmt, group)
    made = kernels(fmt, META, workspace)
    if isinstance(made, NuqTriton) and fmt.calibrated:
        poles, half = torch.tensor(normal_poles(fmt.k_bits)), torch.zeros(fmt.head_dim // 2)
        made.calibrate(NuqTables(poles, poles, torch.zeros(2, KV_HEADS, fmt.head_dim), half))
    launch = made.decoding(_pool(made, fmt), spans, q, out)
    return Example(f"decode {name} D={fmt.head_dim} Π={fmt.page_tokens} G={group}", launch, ROWS_AT_ONCE.value)


def sealing(kernels: type[InRecords], fmt: Any, name: str, seal: Callable[..., Launch]) -> Example:
    """Pages of a prompt of 16K tokens."""
    count = 2**14 // fmt.page_tokens
    k, v = (empty(count, KV_HEADS, fmt.page_tokens, fmt.head_dim, dtype=torch.float16) for _ in range(2))
    pool = _pool(kernels(fmt, META, one_step(fmt, 1)[3]), fmt)
    launch = seal(fmt, pool, empty(count, dtype=torch.int64), k, v)
    return Example(f"seal {name} D={fmt.head_dim} Π={fmt.page_tokens}", launch)


def _pool(kernels: InRecords, fmt: Any) -> Pool:
    planes = kernels.new_planes([fmt], TOKENS // fmt.page_tokens, KV_HEADS)[0]
    return replace(pool_of(HackFormat(fmt.head_dim, fmt.page_tokens), 0), planes=planes)


def floats(fmt: FloatFormat, group: int) -> tuple[Example, ...]:
    """Every kernel for pages of small floating-point numbers."""
    name = f"{fmt.element} {fmt.scaling}"
    return decoding(FloatTriton, fmt, name, group), sealing(FloatTriton, fmt, name, float_seal_launch)


def groups(fmt: GroupFormat, group: int) -> tuple[Example, ...]:
    """Every kernel for pages of integer codes in groups."""
    name = f"{'centred' if fmt.k.centre else 'groups'} K{fmt.k.bits}V{fmt.v.bits}"
    return decoding(GroupTriton, fmt, name, group), sealing(GroupTriton, fmt, name, group_seal_launch)


def lookups(head_dim: int, group: int) -> tuple[Example, ...]:
    """Decode over pages of deltas, of non-uniform levels and of Huffman codes."""
    early, late = DeltaSide(5, 15), DeltaSide(4, 7)
    by_token = HuffmanSide(Unit.TOKEN, 0.15, 2.875)
    return (
        decoding(DeltaTriton, DeltaFormat(head_dim, early, late), "deltas K5V4", group),
        *(
            decoding(NuqTriton, NuqFormat(head_dim, bits, bits, calibrated), f"nuq K{bits}V{bits}{name}", group)
            for bits in (4, 3, 2)
            for calibrated, name in ((False, ""), (True, " calibrated"))
        ),
        *(
            decoding(HuffmanTriton, HuffmanFormat(head_dim, k, by_token), f"huffman by {k.unit}", group)
            for k in (HuffmanSide(Unit.BLOCK, 0.05, 3.75), HuffmanSide(Unit.CHANNEL, 0.25, 2.375))
        ),
    )


def _centred(bits: int, head_dim: int) -> Grouping:
    """As many codes as `bits` hold, but for one, with a scale for each row."""
    return Grouping(bits, head_dim, centre=2 ** (bits - 1) - 1)


NUMBERS: Final = (
    (Element.E4M3, Scaling.PAGE),
    (Element.E4M3, Scaling.POWER),
    (Element.E2M3, Scaling.POWER),
    (Element.E2M1, Scaling.POWER),
    (Element.E2M1, Scaling.TWOFOLD),
)
"""The formats of codecs `fp8`, `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`."""
FLOATS: Final = tuple(
    example
    for element, scaling in NUMBERS
    for d, group in ((128, 8), (128, 4), (64, 3))
    for example in floats(FloatFormat(d, element, scaling, 64), group)
    if group != 8 or example.name.startswith("decode")
)
GROUPS: Final = tuple(
    example
    for bits in (4, 2)
    for d, group in ((128, 4), (64, 3))
    for example in groups(GroupFormat(d, Grouping(bits, 32, by_channel=True), Grouping(bits, 32), 64), group)
)
"""The formats of codecs `kivi-*`."""
CENTRED: Final = tuple(
    example
    for k_bits, v_bits in ((5, 5), (5, 4), (4, 4))
    for d, group in ((128, 4), (64, 3))
    for example in groups(GroupFormat(d, _centred(k_bits, d), _centred(v_bits, d), 64), group)
)
"""The formats of codecs `cachegen*`."""
LOOKUPS: Final = tuple(example for d, group in ((128, 4), (64, 3)) for example in lookups(d, group))
"""The formats of codecs `cachegen-delta`, `kvquant-*` and `kvcomp*`."""
