"""Rivals of homomorphic attention, equally tuned and on the same engine, and measurements of the machine's limits.

`bf16` keeps pages of BF16 rows. `dequantize` reads the pages of `hack` and turns every code into its value before it
multiplies, as systems do that only store the cache quantized. Both need AVX-512 BF16, and page_tokens and head_dim that
are multiples of 64. Their own page is exact, and their arguments are those of `PageKernels.attend`. A rival may not use
better instructions than the kernels that it is compared with. So there is no rival of AVX2 kernels, and none uses AMX.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from hack_kernels.base import BackendUnavailable, Planes, Pool, Rows, Spans
from hack_kernels.cpu.attention import attend
from hack_kernels.cpu.extension import check_built_from, compiled, supported_isas
from hack_kernels.cpu.hack import native_format
from hack_kernels.cpu.rows import native_row_format
from hack_kernels.hack_format import Arithmetic, HackFormat, OpenPage
from hack_kernels.row_format import RowFormat
from torch import Tensor

RIVALS: Final = ("bf16", "dequantize")
ISAS: Final = ("avx512-amx", "avx512-bf16", "avx512-vnni")
"""Instruction sets of the kernels with which rivals are compared. Rivals need AVX-512 BF16 even beside the last one."""

SOURCES: Final = Path(__file__).with_name("csrc")
WORDS: Final = 2**17
"""Words that `read_all` reads at a time."""


class Rival:
    """One of `RIVALS`, to compare with kernels of instruction set `isa`. Raises `BackendUnavailable` for other sets."""

    def __init__(self, name: str, threads: int, isa: str = ISAS[-1]) -> None:
        if isa not in ISAS:
            raise BackendUnavailable(f"no rival {name!r} with instruction set {isa!r}; rivals need AVX-512 BF16")
        try:
            self._kernels = compiled().kernels_of(compiled_lab().rival(name), threads)
        except ValueError as error:
            raise BackendUnavailable(str(error)) from error
        self.name = name

    def attend(self, fmt: HackFormat, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention over a pool: `bf16` needs `bf16_pages` as planes, `dequantize` those of the backend `cpu`."""
        if fmt.arithmetic is not Arithmetic.SYMMETRIC or fmt.open_page is not OpenPage.EXACT:
            raise ValueError("rivals know neither forms of P and Q nor other open pages")
        if fmt.page_tokens % 64 or fmt.head_dim % 64 or (fmt.k_bits, fmt.v_bits) != (2, 2):
            raise ValueError("rivals need 2 bits, and page_tokens and head_dim that are multiples of 64")
        return attend(self._kernels, self._format(fmt), 0, pool, spans, rows)

    def _format(self, fmt: HackFormat) -> Any:
        if self.name == "dequantize":
            return native_format(fmt)
        return native_row_format(RowFormat(fmt.head_dim, fmt.page_tokens))


def available(threads: int, isa: str) -> dict[str, Rival]:
    """Name -> rival, for every rival that this processor runs, to compare with kernels of instruction set `isa`."""
    found = {}
    for name in RIVALS:
        with suppress(BackendUnavailable):
            found[name] = Rival(name, threads, isa)
    return found


def bf16_pages(k: Tensor, v: Tensor) -> Planes:
    """Pages of the rival `bf16` from rows [N, Hkv, Π, D] of any dtype, in the order that its products need.

    They take the place of FP16 rows: their dtype is float16, but the bits are BF16.
    """
    n, heads, pi, d = k.shape
    k_order = k.bfloat16().view(n, heads, pi // 16, 16, d // 2, 2).transpose(3, 4)
    v_order = v.bfloat16().view(n, heads, pi // 2, 2, d // 16, 16).permute(0, 1, 4, 2, 5, 3)
    return {
        name: x.contiguous().view(n, heads, pi, d).view(torch.float16) for name, x in (("k", k_order), ("v", v_order))
    }


def run_dots(isa: str, rounds: int, threads: int) -> int:
    """Run bare integer dot products in registers on each thread; returns the total number of products of two bytes.

    Raises `BackendUnavailable` if the processor does not run `isa`.
    """
    if isa not in supported_isas():
        raise BackendUnavailable(f"this processor or build does not run instruction set {isa!r}")
    compiled_lab().dots(isa, rounds, threads)
    return int(compiled_lab().PRODUCTS_PER_ROUND) * rounds * threads


def read_all(words: Tensor, threads: int) -> None:
    """Read a contiguous tensor of uint64, a multiple of `WORDS` of them: the machine's read bandwidth."""
    if words.dtype is not torch.uint64 or not words.is_contiguous() or words.numel() % WORDS:
        raise ValueError(f"words must be contiguous uint64, a multiple of {WORDS} of them")
    compiled_lab().read_all(words.data_ptr(), words.numel(), threads)


@cache
def compiled_lab() -> Any:
    """The lab's extension. Raises `BackendUnavailable` if it is not built, `ImportError` if it is out of date."""
    try:
        module = importlib.import_module("lab._rivals")
    except ModuleNotFoundError as error:
        raise BackendUnavailable("the C++ extension lab._rivals is not built: `make` builds it") from error
    check_built_from(SOURCES, module.SOURCES)
    return module
