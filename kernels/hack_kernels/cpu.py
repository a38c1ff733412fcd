"""Backend `cpu`: the C++ kernels of `kernels/csrc`, with the instruction set chosen at run time.

Pages rest in the order that the vector unit wants (csrc/format.h); `install` and `export` convert bit-exactly. The
binding checks what a decode step calls, as each check in Python costs it more than the same in C++, and refuses open
pages, spans and rows that are not contiguous. The GIL is free while C++ computes.
"""

from __future__ import annotations

import importlib
import logging
import math
import mmap
import os
from collections.abc import Mapping
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hack_kernels.base import (
    SUM_PLANES,
    Arithmetic,
    BackendUnavailable,
    HackFormat,
    HackKernels,
    HackPages,
    OpenPage,
    Rounding,
    Spans,
)
from hack_kernels.check import check_install, check_rows, check_seal
from hack_kernels.reference import ReferenceKernels
from hack_kernels.rowwise import Rowwise

ISA_VARIABLE: Final = "HACKKV_CPU_ISA"
"""Environment variable that forces an instruction set: avx512-vnni, avx2 or portable."""

HUGE_PAGE_BYTES: Final = 2**21
LINE_BYTES: Final = 64
SOURCES: Final = Path(__file__).parents[1] / "csrc"

_log = logging.getLogger(__name__)


class CpuKernels(Rowwise):
    """Implements `HackKernels`. Raises `BackendUnavailable` where the extension or the instruction set is missing."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        self.approximation_s = 0.0  # the correction terms are fused into the products; they have no time of their own
        module = extension()
        supported: list[str] = module.supported_isas()
        chosen = isa or supported[0]
        if chosen not in supported:
            raise BackendUnavailable(
                f"this processor or build does not run instruction set {chosen!r}; it runs {', '.join(supported)}"
            )
        self.isa = chosen
        self._kernels = module.kernels(chosen, threads or torch.get_num_threads())
        self._format = lru_cache(maxsize=16)(native_format)
        self._row_format = lru_cache(maxsize=16)(row_format)

    @property
    def threads(self) -> int:
        """Threads of one call, the caller's included."""
        return int(self._kernels.threads)

    @threads.setter
    def threads(self, threads: int) -> None:
        self._kernels.threads = threads

    def new_pages(self, fmt: HackFormat, num_pages: int, num_kv_heads: int) -> HackPages:
        """A zeroed pool for one layer, in huge pages where the system has them."""
        return zeros_in_huge_pages(
            {name: ((num_pages, num_kv_heads, *shape), dtype) for name, (shape, dtype) in fmt.plane_specs().items()}
        )

    def seal(
        self, fmt: HackFormat, layer: int, pages: HackPages, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Quantize full pages into the pool, in native order."""
        check_seal(fmt, pages, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._kernels.seal(self._format(fmt), layer, pages, *rows)

    def requantize(self, fmt: HackFormat, layer: int, pages: HackPages, spans: Spans, k: Tensor, v: Tensor) -> None:
        """In native order: what stays of a page's K is not touched, its V passes through FP16 in scratch memory."""
        rows = (k.contiguous(), v.contiguous())
        self._kernels.requantize(self._format(fmt), layer, pages, _where(spans), *rows)

    def install(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
        """Wire order to native order; absent sums are counted."""
        check_install(fmt, pages, page_ids, planes)
        if not _is_whole(pages):
            local = self.new_pages(fmt, page_ids.numel(), pages["k_codes"].shape[1])
            self.install(fmt, local, torch.arange(page_ids.numel()), planes)
            for name, plane in pages.items():
                plane[page_ids] = local[name]
            return
        if SUM_PLANES[0] not in planes or SUM_PLANES[1] not in planes:
            planes = {name: plane for name, plane in planes.items() if name not in SUM_PLANES}
        wire = {name: plane.contiguous() for name, plane in planes.items()}
        self._kernels.install(self._format(fmt), pages, page_ids.contiguous(), wire)

    def export(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> HackPages:
        """Native order to wire order."""
        if not _is_whole(pages):
            local = {name: plane[page_ids].contiguous() for name, plane in pages.items()}
            return self.export(fmt, local, torch.arange(page_ids.numel()))
        heads, count = pages["k_codes"].shape[1], page_ids.numel()
        wire = {
            name: torch.empty((heads, count, *shape), dtype=dtype) for name, (shape, dtype) in fmt.plane_specs().items()
        }
        self._kernels.export(self._format(fmt), pages, page_ids.contiguous(), wire)
        return wire

    def attn_prefill(
        self,
        fmt: HackFormat,
        layer: int,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Blocks of queries against one page after another, unpacked once per block."""
        rows = (open_k, open_v, spans, q, k.contiguous(), v.contiguous())
        return self._attend(self._format(fmt), layer, pages, *rows)

    def attn_decode(
        self, fmt: HackFormat, layer: int, pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor
    ) -> Tensor:
        """Packed codes against the query heads of a group, without unpacking them to memory."""
        return self._attend(self._format(fmt), layer, pages, open_k, open_v, spans, q, None, None)

    def new_rows(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int) -> HackPages:
        """Planes `k` and `v`, in huge pages where the system has them."""
        shape = (num_pages, num_kv_heads, page_tokens, head_dim)
        return zeros_in_huge_pages(dict.fromkeys("kv", (shape, torch.float16)))

    def attn_rows(
        self,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """C++ on the FP16 rows as they rest; shapes that it does not take go to the reference (`takes_rows`)."""
        check_rows(pages, open_k, open_v, spans, q, k, v)
        page_tokens, head_dim = open_k.shape[2:]
        if not takes_rows(page_tokens, head_dim):
            return ReferenceKernels().attn_rows(pages, open_k, open_v, spans, q, k, v)
        planes = {f"{name}_codes": pages[name].view(torch.uint8) for name in "kv"}
        new = [None if x is None else x.contiguous() for x in (k, v)]
        return self._attend(self._row_format(page_tokens, head_dim), 0, planes, open_k, open_v, spans, q, *new)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """Rows stay in the first cache."""
        out = torch.empty_like(x)
        self._kernels.norm(x, more, weight, epsilon, out)
        return out

    def rotate(self, x: Tensor, heads: int, turns: Tensor) -> None:
        """One pass over each row, to the bit what torch does."""
        self._kernels.rotate(x, heads, turns)

    def gate(self, x: Tensor) -> Tensor:
        """One pass over each row."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._kernels.gate(x, out)
        return out

    def largest(self, x: Tensor) -> list[int]:
        """One pass over each row, as integers."""
        found: list[int] = self._kernels.largest(x)
        return found

    def append(self, open_k: Tensor, open_v: Tensor, spans: Spans, k: Tensor, v: Tensor) -> bool:
        """Rounded aside first, then written."""
        appended: bool = self._kernels.append(open_k, open_v, spans.starts, spans.slots, k, v)
        return appended

    def _attend(
        self,
        native: Any,
        layer: int,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
    ) -> Tensor:
        if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return self._attend(native, layer, pages, open_k, open_v, spans, q.float(), k, v).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._kernels.attend(native, layer, pages, open_k, open_v, _where(spans), q, out, k, v)
        return out


def zeros_in_huge_pages(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Zeros of the given shapes and dtypes in one block of memory, which the system is asked to map in huge pages.

    A KV page touches six planes at scattered places, and each is a walk of a page table in units of 4 KiB otherwise.
    In one block, for the planes of metadata are smaller than a huge page in a pool of moderate size.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs.values()]
    if not hasattr(mmap, "MADV_HUGEPAGE") or sum(sizes) < HUGE_PAGE_BYTES:
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    lines = [-(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
    whole_pages = -(-sum(lines) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    block = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    planes = torch.frombuffer(block, dtype=torch.uint8)[: sum(lines)].split(lines)
    return {
        name: plane[:size].view(dtype).view(shape)
        for (name, (shape, dtype)), plane, size in zip(specs.items(), planes, sizes, strict=True)
    }


def _where(spans: Spans) -> tuple[Tensor, ...]:
    """Spans as the binding takes them, which refuses what is not contiguous."""
    return spans.starts, spans.counts, spans.offsets, spans.table, spans.slots


def _is_whole(pages: HackPages) -> bool:
    """False for a view of some KV heads of a pool, which C++ does not take: its pages are handled in a copy."""
    return pages["k_codes"].is_contiguous()


def create() -> HackKernels:
    """The fastest instruction set of this processor, or the one that HACKKV_CPU_ISA names."""
    kernels = CpuKernels(os.environ.get(ISA_VARIABLE) or None)
    _log.info("cpu kernels: instruction set %s, %d threads", kernels.isa, kernels.threads)
    return kernels


def supported_isas() -> list[str]:
    """Instruction sets that this build and processor run, fastest first. Raises `BackendUnavailable`."""
    return list(extension().supported_isas())


@cache
def extension() -> Any:
    """The compiled module. Raises `BackendUnavailable` where it is not built, `ImportError` where it is out of date."""
    try:
        module = importlib.import_module("hack_kernels._cpu")
    except ModuleNotFoundError as error:
        raise BackendUnavailable("the C++ extension hack_kernels._cpu is not built: pip install -e .") from error
    check_built_from(SOURCES, getattr(module, "SOURCES", ""))
    return module


def check_built_from(sources: Path, digest: str) -> None:
    """Compare what was compiled (CMakeLists.txt) with a checkout's sources; an installed wheel has none.

    An extension older than its Python code would be called with other arguments, or give other codes than its peers.
    """
    paths = sorted((path for pattern in ("*.h", "*.cpp", "simd/*.h") for path in sources.glob(pattern)), key=str)
    digests = "".join(sha256(path.read_bytes()).hexdigest() for path in paths)
    if paths and sha256(digests.encode()).hexdigest() != digest:
        raise ImportError(f"the C++ kernels were not built from {sources} as it is now: pip install -e . builds them")


def takes_rows(page_tokens: int, head_dim: int) -> bool:
    """Whether `csrc/rows.h` takes pages of this shape; those of every model that `hack` serves are among them."""
    return page_tokens % 32 == 0 and page_tokens <= 128 and head_dim % 32 == 0 and head_dim <= 256


def row_format(page_tokens: int, head_dim: int) -> Any:
    """Pages of 16-bit rows for C++, which are what 16 bits per code stand for."""
    return extension().make_format(
        head_dim=head_dim,
        page_tokens=page_tokens,
        k_bits=16,
        v_bits=16,
        k_partition=head_dim,
        stochastic=False,
        asymmetric=False,
        stored_sums=False,
        own_k_codes=False,
        own_v_codes=False,
        seed=0,
    )


def native_format(fmt: HackFormat) -> Any:
    """`fmt` for C++."""
    return extension().make_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        k_bits=fmt.k_bits,
        v_bits=fmt.v_bits,
        k_partition=fmt.k_partition,
        stochastic=fmt.rounding is Rounding.STOCHASTIC,
        asymmetric=fmt.arithmetic is Arithmetic.ASYMMETRIC,
        stored_sums=fmt.stored_sums,
        own_k_codes=fmt.open_page is not OpenPage.EXACT,
        own_v_codes=fmt.open_page is OpenPage.REQUANTIZE,
        seed=fmt.seed,
    )
