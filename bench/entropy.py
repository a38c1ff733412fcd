"""The size of CacheGen's codes after entropy coding, and the least it could be: `python -m bench.entropy smollm2`.

The model reads text on which none of its losses is measured, and its rows become codes as in codec `cachegen`. Bits are
per value; scales, which every form sends alike, are not counted. Three kinds of codes are compared:

- codes of values, as in the authors' code, with its levels 2 (the default) and 3 (32 bins in all layers);
- deltas of these codes: a code less its anchor's, modulo the alphabet, which changes no value;
- deltas of values, quantized, with anchors in 8 bits (`delta: true`), as in the paper.

An arithmetic coder comes near the entropy of order 0, with a table for each layer, KV head and channel (the paper's
choice), or with one for each layer. Tables are not counted, and anchors have tables of their own. Two sizes are shown
for comparison: that of the planes in frames of some pages, as a sender cuts and codes them, and that of the same frames
if the bytes of a channel lay side by side ("sorted"). A second table has the size in each wire form that codes, tables
counted, and the form's speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import thread_time
from typing import Final

import numpy as np
import torch
from hack_kernels.base import Planes
from hack_kernels.delta_format import GROUP_ROWS, DeltaFormat, DeltaSide
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.read_format import pack_codes, unpack_codes
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.reference.groups import GroupReference
from numpy.typing import NDArray
from torch import Tensor

from bench.rooms import PAGE, pages_of
from hackkv.codecs.cachegen import LEVELS, Level, bins_of, grouping
from hackkv.framing import FrameWriter
from hackkv.wire_form import WireForm, wire_form

CPU: Final = torch.device("cpu")
FRAME_PAGES: Final = 8
"""Pages of a frame: as many as a chunk of 512 tokens seals."""
LEVEL: Final[Level] = "2"
FINER: Final[Level] = "3"
FORM: Final = "zstd"
FORMS: Final = (FORM, "rans")
REPEATS: Final = 3

Coded = tuple[list[Tensor], Planes]
"""(symbols [pages, Hkv, rows, D], one tensor for each alphabet with its own tables; planes [pages, Hkv, ...])"""
Coding = Callable[[str, int, Tensor], tuple[Coded, Tensor]]
"""("k" or "v", layer, rows [pages, Hkv, Π, D] FP16) -> (codes, the values that they stand for)."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("python -m bench.entropy", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="", help="checkpoint folder or hub name; default: the shipped model"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pages = pages_of(args.model, args.tokens)
    heads = (
        "rows",
        "codes",
        "entropy, by channel",
        "by layer",
        "on the wire",
        "of entropy by channel",
        "sorted",
        "error",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in ("k", "v"):
        for says, of in KINDS.items():
            found = [measured(of, name, layer, x) for layer, x in enumerate(pages[name])]
            *bits, error = (sum(each) / len(found) for each in zip(*found, strict=True))
            channel, layer, wire, in_order = (f"{each:.3f}" for each in bits)
            words = (name, says, channel, layer, wire, f"{bits[2] / bits[0]:.3f}", in_order, f"{error:.4f}")
            print(f"| {' | '.join(words)} |", flush=True)
    coders(pages)


def measured(of: Coding, name: str, layer: int, x: Tensor) -> tuple[float, ...]:
    """For rows x [pages, Hkv, Π, D]: bits per value by channel, by layer, on the wire and sorted on the wire, and the
    squared error as a share of x's square."""
    (alphabets, planes), read = of(name, layer, x)
    error = float((read - x.float()).square().mean() / x.float().square().mean())
    by_channel, by_layer = (sum(map(each, alphabets)) / x.numel() for each in (bits_by_channel, bits_by_layer))
    wire, in_order = (wire_bits(planes, by_channel=sort) / x.numel() for sort in (False, True))
    return by_channel, by_layer, wire, in_order, error


def values(name: str, layer: int, x: Tensor, level: Level = LEVEL) -> tuple[Coded, Tensor]:
    """Codes of values, as in the authors' code."""
    fmt = group_format(layer, x.shape[-1], level)
    kernels = GroupReference(fmt, CPU)
    planes = kernels.quantize(name, x)
    codes = unpack_codes(name, planes, fmt.side(name).bits, "_codes")
    return ([codes], without_scales(planes)), kernels.dequantize(name, planes)


def deltas_of_codes(name: str, layer: int, x: Tensor) -> tuple[Coded, Tensor]:
    """Deltas of codes. Anchors keep their codes; other codes become differences around the alphabet's centre. Both are
    packed in planes of their own."""
    ([codes], _), read = values(name, layer, x)
    side = group_format(layer, x.shape[-1]).side(name)
    rows = torch.arange(PAGE)
    first = rows // GROUP_ROWS * GROUP_ROWS
    apart = (codes.int() - codes[..., first, :].int() + side.centre) % (2 * side.centre + 1)
    anchors, others = codes[..., rows == first, :], apart[..., rows != first, :].to(torch.uint8)
    planes = {
        f"{kind}_{plane}": packed
        for kind, each in (("anchors", anchors), ("others", others))
        for plane, packed in pack_codes(name, whole(each), side.bits, "_codes").items()
    }
    return ([anchors, others], planes), read


def deltas(name: str, layer: int, x: Tensor) -> tuple[Coded, Tensor]:
    """Deltas of values, as in the paper."""
    fmt = delta_format(layer, x.shape[-1])
    kernels, side = DeltaReference(fmt, CPU), fmt.side(name)
    planes = kernels.quantize(name, x)
    alphabets = [planes[f"{name}_anchor"], kernels.unpacked(name, planes)]
    assert int(alphabets[1].max()) <= 2 * side.centre
    return (alphabets, without_scales(planes)), kernels.dequantize(name, planes)


KINDS: Final[dict[str, Coding]] = {
    "of values": values,
    "of values, level 3": partial(values, level=FINER),
    "deltas of codes": deltas_of_codes,
    "deltas of values": deltas,
}


def group_format(layer: int, head_dim: int, level: Level = LEVEL) -> GroupFormat:
    """The format of a layer of codec `cachegen`."""
    k, v = groupings(layer, head_dim, level)
    return GroupFormat(head_dim, k, v, PAGE)


def delta_format(layer: int, head_dim: int) -> DeltaFormat:
    """The format of a layer of codec `cachegen` with deltas."""
    k, v = groupings(layer, head_dim)
    return DeltaFormat(head_dim, DeltaSide(k.bits, k.centre), DeltaSide(v.bits, v.centre), PAGE)


def groupings(layer: int, head_dim: int, level: Level = LEVEL) -> tuple[Grouping, Grouping]:
    """The groupings of K and V."""
    k, v = (grouping(bins_of(bins, layer), head_dim) for bins in LEVELS[level])
    return k, v


def without_scales(planes: Planes) -> Planes:
    """The planes that hold codes."""
    return {name: plane for name, plane in planes.items() if not name.endswith("_scale")}


def whole(codes: Tensor) -> Tensor:
    """Codes padded with rows of 0 until the rows fill bytes."""
    return torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[-2] % 8))


def bits_by_channel(codes: Tensor) -> float:
    """Bits of all symbols [pages, Hkv, rows, D] at their entropy, with a table for each KV head and channel."""
    return sum(entropy_bits(channel) for head in codes.transpose(0, 1) for channel in head.flatten(0, 1).T)


def bits_by_layer(codes: Tensor) -> float:
    """Bits of all symbols at their entropy, with one table."""
    return entropy_bits(codes.flatten())


def entropy_bits(symbols: Tensor) -> float:
    """Bits of symbols [n] uint8: n times their entropy of order 0."""
    counts = torch.bincount(symbols.int()).double()
    counts = counts[counts > 0]
    return float(-(counts * (counts / counts.sum()).log2()).sum())


def frames(pages: Planes) -> Iterator[Planes]:
    """The planes [Hkv, pages, ...] of each frame, cut from those of a text, [pages, Hkv, ...]."""
    for at in range(0, len(next(iter(pages.values()))), FRAME_PAGES):
        yield {name: plane[at : at + FRAME_PAGES].transpose(0, 1).contiguous() for name, plane in pages.items()}


def wire_bits(pages: Planes, *, by_channel: bool = False) -> float:
    """Bits of the coded planes of all frames, without headers. `by_channel` puts bytes of a channel side by side."""
    writer, bits = FrameWriter("entropy", 0, wire_form(FORM)), 0.0
    for part in frames(pages):
        ordered = {n: plane.permute(0, 3, 1, 2).contiguous() for n, plane in part.items()} if by_channel else part
        bits += sum(8 * len(frame.payload) for frame in writer.frames(0, 0, [ordered]))
    return bits


def coders(pages: dict[str, list[Tensor]]) -> None:
    """Print the bits of codes in each wire form that codes, and the form's speed on one thread."""
    print("\n| rows | codes | wire form | bits | of zstd's | encodes, MB/s of packed codes | decodes, MB/s |")
    print("|---|---|---|---|---|---|---|")
    for name in ("k", "v"):
        for says, of in KINDS.items():
            cut = [part for layer, x in enumerate(pages[name]) for part in frames(of(name, layer, x)[0][1])]
            elements, first = sum(x.numel() for x in pages[name]), 0.0
            for form in FORMS:
                packed, size, encode_s, decode_s = spent(wire_form(form), cut)
                first = first or size
                speeds = f"{packed / encode_s / 1e6:.0f} | {packed / decode_s / 1e6:.0f}"
                print(f"| {name} | {says} | {form} | {8 * size / elements:.3f} | {size / first:.3f} | {speeds} |")


def spent(form: WireForm, cut: list[Planes]) -> tuple[int, int, float, float]:
    """(bytes at rest, bytes coded, processor seconds to encode, to decode) of all planes; the best of `REPEATS`."""
    packed, size, encode_s, decode_s = 0, 0, 0.0, 0.0
    for plane in (plane for part in cut for plane in part.values()):
        raw: NDArray[np.uint8] = plane.numpy().reshape(-1)
        found = [once(form, raw, plane.shape) for _ in range(REPEATS)]
        packed, size = packed + raw.size, size + found[0][0]
        encode_s += min(each[1] for each in found)
        decode_s += min(each[2] for each in found)
    return packed, size, encode_s, decode_s


def once(form: WireForm, plane: NDArray[np.uint8], shape: Sequence[int]) -> tuple[int, float, float]:
    """(bytes, processor seconds to encode, to decode). A plane that does not shrink is not decoded."""
    began = thread_time()
    coded = form.encode(plane, 1, shape)
    encode_s = thread_time() - began
    if coded is None:
        return plane.size, encode_s, 0.0
    back = np.empty_like(plane)
    began = thread_time()
    form.decode(memoryview(coded), back, 1)
    decode_s = thread_time() - began
    assert np.array_equal(back, plane)
    return len(coded), encode_s, decode_s


if __name__ == "__main__":
    main()
