"""The size of CacheGen's codes after entropy coding, and the least it could be: `python -m bench.entropy smollm2`.

The model reads text on which none of its losses is measured, and its rows become codes as in codec `cachegen`. Bits are
per value; scales, which every form sends alike, are not counted. Three kinds of codes are compared:

- codes of values, as in the authors' code, with its levels 2 (the default) and 3 (32 bins in all layers);
- deltas of these codes: a code less its anchor's, modulo the alphabet, which changes no value;
- deltas of values, quantized, with anchors in 8 bits (`delta: true`), as in the paper.

An arithmetic coder comes near the entropy of order 0, with a table for each layer, KV head and channel (the paper's
choice), or with one for each layer. Tables are not counted, and anchors have tables of their own. Two sizes are shown
for comparison: that of the planes in frames of some pages, as a sender cuts and codes them, and that of the same frames
if the bytes of a channel lay side by side ("sorted"). With `--constriction`, if that library is installed, an ANS coder
codes codes of values with a table for each channel of a frame, and is timed beside Zstandard.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any, Final

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
from hackkv.wire_form import wire_form

CPU: Final = torch.device("cpu")
FRAME_PAGES: Final = 8
"""Pages of a frame: as many as a chunk of 512 tokens seals."""
LEVEL: Final[Level] = "2"
FINER: Final[Level] = "3"
FORM: Final = "zstd"

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
    parser.add_argument("--constriction", action="store_true", help="time an ANS coder too, if it is installed")
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
    if args.constriction:
        ans(pages)


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
        bits += sum(8 * len(frame.payload) for frame in writer.frames(0, 0, ordered))
    return bits


def ans(pages: dict[str, list[Tensor]]) -> None:
    """Print the bits of codes of values with constriction's ANS coder, and the speed of both coders on one thread."""
    stream: Any = import_module("constriction").stream
    form = wire_form(FORM)
    print("\n| rows | coder | bits | encodes, MB/s of packed codes | decodes, MB/s |")
    print("|---|---|---|---|---|")
    for name in ("k", "v"):
        taken: dict[str, NDArray[np.float64]] = {"zstd": np.zeros(4), "ANS": np.zeros(4)}
        for layer, x in enumerate(pages[name]):
            ([codes], planes), _ = values(name, layer, x)
            for part, symbols in zip(frames(planes), frames({"codes": codes}), strict=True):
                packed = sum(plane.nbytes for plane in part.values())
                for coder, found in (
                    ("zstd", [zstd_once(form, plane.numpy().reshape(-1)) for plane in part.values()]),
                    ("ANS", [ans_once(stream, symbols["codes"])]),
                ):
                    taken[coder] += np.array([packed, *(sum(each) for each in zip(*found, strict=True))])
        for coder, (packed, size, encode_s, decode_s) in taken.items():
            bits = 8 * size / sum(x.numel() for x in pages[name])
            print(f"| {name} | {coder} | {bits:.3f} | {packed / encode_s / 1e6:.1f} | {packed / decode_s / 1e6:.1f} |")


def zstd_once(form: Any, plane: NDArray[np.uint8]) -> tuple[float, float, float]:
    """(bytes, seconds to encode, seconds to decode) with Zstandard."""
    began = perf_counter()
    coded = form.encode(plane, 1)
    encoded, back = perf_counter(), np.empty_like(plane)
    if coded is None:
        return plane.size, encoded - began, 0.0
    between = perf_counter()
    form.decode(memoryview(coded), back, 1)
    ended = perf_counter()
    assert np.array_equal(back, plane)
    return len(coded), encoded - began, ended - between


def ans_once(stream: Any, codes: Tensor) -> tuple[float, float, float]:
    """(bytes, seconds to encode, seconds to decode) with ANS and a table for each channel. Tables are not counted in
    the bytes; the time of encoding includes making them."""
    channels = codes.permute(0, 3, 1, 2).flatten(0, 1).flatten(1).int().numpy()
    began = perf_counter()
    counts = [np.bincount(channel, minlength=int(codes.max()) + 1) + 1e-2 for channel in channels]
    models = [stream.model.Categorical((each / each.sum()).astype(np.float32), perfect=False) for each in counts]
    coder = stream.stack.AnsCoder()
    for channel, model in zip(channels[::-1], models[::-1], strict=True):
        coder.encode_reverse(channel, model)
    words = coder.get_compressed()
    encoded = perf_counter()
    decoder = stream.stack.AnsCoder(words)
    back = np.stack([decoder.decode(model, channels.shape[1]) for model in models])
    ended = perf_counter()
    assert np.array_equal(back, channels)
    return words.nbytes, encoded - began, ended - encoded


if __name__ == "__main__":
    main()
