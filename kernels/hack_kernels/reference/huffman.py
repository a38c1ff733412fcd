"""The definition of error-bounded codes under Huffman codes; `huffman_format.py` says what the planes mean."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.huffman_format import LONGEST, SLACK_BYTES, SLICES, Books, HuffmanFormat, Unit, books_of
from hack_kernels.quantize import fp16_up
from hack_kernels.reference.reading import ALL_HEADS, LARGEST_FP16, ReadingReference

ALONG: Final = {Unit.BLOCK: (-2, -1), Unit.CHANNEL: (-2,), Unit.TOKEN: (-1,)}
"""The axes of [..., Π, D] that a unit spans."""


class HuffmanReference(ReadingReference):
    """Implements `PageKernels` for `HuffmanFormat`."""

    def __init__(self, fmt: HuffmanFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self._rungs = {name: fmt.side(name).rungs for name in ("k", "v")}
        self._books = {name: books_of(fmt.side(name).symbols).to(device) for name in ("k", "v")}

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Quantize with one rung after another, until every page fits. On a device that the host would have to wait
        for, all rungs are tried."""
        side, x, books = self.fmt.side(name), rows.float(), self._books[name]
        found: tuple[Tensor, ...] = ()
        fits = torch.zeros(x.shape[:-2], dtype=torch.bool, device=x.device)
        for rung in self._rungs[name]:
            step, first = steps(x, side.unit, rung)
            codes = (torch.round(x / step) - first).long()
            bits, book, centre = choice(books, codes.flatten(-2))
            new = step, first, codes, book[..., None, None], centre[..., None, None]
            found = tuple(map(torch.where, [fits[..., None, None]] * len(new), found or new, new))
            fits |= bits <= self.fmt.room_bits(name)
            if x.device.type == "cpu" and bool(fits.all()):
                break
        step, first, codes, book, centre = (each.flatten(-2) for each in found)
        symbols = torch.remainder(codes - centre, side.symbols)
        sizes, coded = encoded(books.codes[book, symbols], self._coded_bytes(name))
        return {
            f"{name}_step": step.half(),
            f"{name}_first": first.to(torch.int16),
            f"{name}_book": torch.cat((book, centre), -1).to(torch.uint8),
            f"{name}_sizes": sizes,
            f"{name}_codes": coded,
        }

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """(n + c)·s."""
        side, books, shape = self.fmt.side(name), self._books[name], (self.fmt.page_tokens, self.fmt.head_dim)
        book, centre = planes[f"{name}_book"].long().split(1, -1)
        lookup = books.lookup[book[..., 0].clamp(max=len(books.lookup) - 1)]
        symbols = decoded(lookup, planes[f"{name}_sizes"], planes[f"{name}_codes"], self.fmt.elements)
        codes = torch.remainder(symbols + centre.clamp(max=side.symbols - 1), side.symbols).unflatten(-1, shape)
        along = tuple(1 if axis in ALONG[side.unit] else size for axis, size in zip((-2, -1), shape, strict=True))
        first, step = (planes[f"{name}_{part}"].float().unflatten(-1, along) for part in ("first", "step"))
        found: Tensor = (first + codes) * step
        return found

    def _coded_bytes(self, name: str) -> int:
        return next(plane.page_bytes for plane in self.fmt.planes if plane.name == f"{name}_codes")


def steps(x: Tensor, unit: Unit, rung: float) -> tuple[Tensor, Tensor]:
    """s and n, float32, of the units of pages x [..., Π, D], with steps of `rung` times their ranges. Their shape is
    [..., Π, D], with 1 for the axes that a unit spans."""
    least, most = x.amin(ALONG[unit], keepdim=True), x.amax(ALONG[unit], keepdim=True)
    wanted = torch.maximum((most - least) * rung, torch.maximum(-least, most) * 2.0**-14)
    step = fp16_up(wanted.clamp(max=LARGEST_FP16)).float()
    step = torch.where(step == 0, torch.ones_like(step), step)
    return step, torch.round(least / step)


def choice(books: Books, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For the codes [..., n] of pages: the fewest bits that they take, the book and the centre, each [...] int64."""
    lengths = (books.codes >> 16).long()
    symbols = lengths.shape[1]
    symbol = torch.arange(symbols, device=codes.device)
    shifted = (symbol[:, None] - symbol).remainder(symbols)
    costs = lengths[:, shifted].permute(1, 0, 2).flatten(1)  # [A, B·A]: bits of a code with each book and centre
    seen = torch.zeros((*codes.shape[:-1], symbols), dtype=torch.float64, device=codes.device)
    seen.scatter_add_(-1, codes, torch.ones_like(codes, dtype=torch.float64))
    bits, at = (seen @ costs.double()).min(-1)  # whole numbers, exact in FP64
    return bits.long(), at // symbols, at % symbols


def encoded(entries: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Entries [..., n] of `Books.codes` -> sizes of slices [..., 16] int16, and their bytes [..., size]."""
    lengths = (entries >> 16).unflatten(-1, (SLICES, -1)).long()
    ends = lengths.cumsum(-1)
    sizes = (ends[..., -1] + 7) // 8
    starts = 8 * (sizes.cumsum(-1) - sizes)
    at = (starts[..., None] + ends - lengths).flatten(-2)
    bits = torch.zeros((*entries.shape[:-1], 8 * size), dtype=torch.int32, device=entries.device)
    for bit in range(LONGEST):  # bits above a code's last are 0
        bits.scatter_add_(-1, at + bit, (entries & 0xFFFF) >> bit & 1)
    eight = torch.arange(8, device=bits.device)
    return sizes.to(torch.int16), (bits.unflatten(-1, (-1, 8)) << eight).sum(-1).to(torch.uint8)


def decoded(lookup: Tensor, sizes: Tensor, coded: Tensor, count: int) -> Tensor:
    """The `count` symbols [..., count] int64 of slices, code by code in all slices at once; `lookup` [..., 2^12]."""
    wide = torch.nn.functional.pad(coded.int(), (0, 2))
    words = wide[..., :-2] | wide[..., 1:-1] << 8 | wide[..., 2:] << 16
    windows = words[..., None] >> torch.arange(8, device=words.device) & ((1 << LONGEST) - 1)
    entries = lookup.gather(-1, windows.flatten(-2).long())  # at every bit of the plane
    symbols, lengths = entries >> 8 & 0xFF, entries >> 40 & 0xFF
    last = 8 * (coded.shape[-1] - SLACK_BYTES)
    ends = sizes.long().cumsum(-1)
    at = (8 * (ends - sizes)).clamp(0, last)
    found = list[Tensor]()
    for _ in range(count // SLICES):
        found.append(symbols.gather(-1, at))
        at = (at + lengths.gather(-1, at)).clamp(max=last)
    return torch.stack(found, -1).flatten(-2)
