"""The kernel boundary: what a layer's KV is (`Pool`), what a call is about (`Spans`, `Rows`), what a backend does.

A *page* is Π consecutive rows of K and V of one layer and KV head. A *page format* fixes its bytes. A backend has one
small set of kernels for each page format, bound to it (`PageKernels`), and operations on single rows, which know no
format (`RowKernels`). Where a backend has no kernels for a format, the format's definition in torch serves it.

Letters: T rows of a batch, B sequences, Hq query heads, Hkv KV heads, D head_dim, N pages of a pool, S slots,
Π `page_tokens`, P pages of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from hack_kernels.block_weight import BlockWeight, Matrices, Norms, Weight
from hack_kernels.choosing import ChoiceKernels
from hack_kernels.compiler import Compiler
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.page_selection import PageSelectKernels
from hack_kernels.recorder import Recorder
from hack_kernels.voting import VoteKernels
from hack_kernels.window import OWN_PAGE_ONLY, Window


class BackendUnavailable(RuntimeError):
    """This machine cannot run the backend; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a page of one layer and KV head."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    derived: bool = False
    """The plane follows from the other planes, so a receiver can compute it."""
    most_sum: int | None = None
    """For a plane of sizes: the largest sum of a page's sizes. A receiver refuses larger sums and negative sizes."""
    page_bytes: int = field(init=False, compare=False)
    """Bytes of this plane in one page of one KV head; every frame asks for them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_bytes", prod(self.shape) * self.dtype.itemsize)


class PageFormat(ABC):
    """Everything that fixes the bytes of a sealed page and the arithmetic on it: a frozen, hashable value."""

    head_dim: int
    page_tokens: int
    window: Window = OWN_PAGE_ONLY
    """The pages that queries see exactly. A format that supports no other window keeps this one."""

    @property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The planes of one page of one KV head, in wire order."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a sealed page of one KV head at rest."""
        return sum(plane.page_bytes for plane in self.planes)


Planes = dict[str, Tensor]
"""Plane name -> one tensor for many pages: [N, Hkv, *shape] at rest, [Hkv, P, *shape] in wire order."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer's KV on one device: sealed pages by plane, and the exact rows of sequences in flight, a slot each."""

    planes: Planes
    """Plane name -> [N, Hkv, ...]; the order inside belongs to the kernels that made the pool."""
    open_k: Tensor
    """[S, Hkv, E·Π, D] float16: the E pages of a slot as `window` places them, the open page among them."""
    open_v: Tensor
    """[S, Hkv, E·Π, D] float16."""
    head_start: int = 0
    """The model's number of the pool's first KV head. Stochastic rounding is keyed by the model's numbers, so a process
    that holds some of the heads gives the same bytes as a process that holds all."""
    window: Window = OWN_PAGE_ONLY
    notes: Planes = field(default_factory=dict)
    """Name -> [N, Hkv, ...]: a codec's own data about pages, beside their planes. Kernels do not read them."""

    @property
    def num_pages(self) -> int:
        """N: the number of sealed pages that fit."""
        return next(iter(self.planes.values())).shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Hkv: the number of KV heads in the pool."""
        return self.open_k.shape[1]

    @property
    def page_tokens(self) -> int:
        """Π: the rows of a page."""
        return self.open_k.shape[2] // self.window.pages

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self.open_k.device

    def heads(self, start: int, count: int) -> Pool:
        """A view of KV heads [start, start + count) of this pool."""
        part = slice(start, start + count)
        planes, notes = ({name: plane[:, part] for name, plane in each.items()} for each in (self.planes, self.notes))
        return Pool(planes, self.open_k[:, part], self.open_v[:, part], self.head_start + start, self.window, notes)


@dataclass(frozen=True, slots=True)
class Spans:
    """The rows of each sequence in a flat ragged batch, as tensors that a kernel can read.

    Row i of sequence b is row `offsets[b] + i` of Q, K and V, and the sequence's row number `starts[b] + i`. Row
    numbers count the rows that the cache holds; kernels know no positions. After an eviction, numbering continues from
    the rows that were kept. Column p of `table` is the pool index of the sequence's p-th page; entries past the last
    page are 0 and never read.
    """

    starts: Tensor
    """[B] int64: rows that the cache holds before this batch."""
    counts: Tensor
    """[B] int64: rows of this batch; 1 throughout in decode."""
    offsets: Tensor
    """[B] int64: exclusive prefix sum of `counts`."""
    table: Tensor
    """[B, Pmax] int64. In decode also [B, Hkv, Pmax]: each KV head then reads its own list of pages."""
    slots: Tensor
    """[B] int64: index of the sequence's slot in `open_k` and `open_v`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch, after rotation."""

    q: Tensor
    """[T, Hq, D], of the model's dtype."""
    k: Tensor | None = None
    """[T, Hkv, D] float16. None in decode: the new rows are in the slots already."""
    v: Tensor | None = None
    """[T, Hkv, D] float16, or None with `k`."""


class RowKernels(ChoiceKernels, VoteKernels, PageSelectKernels, Protocol):
    """Operations of a model on rows; `hack_kernels.rowwise` is the definition.

    Rows are float32, float16 or bfloat16. Arithmetic is float32. A row's result does not depend on the rows beside it,
    nor on the number of threads.
    """

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, k] @ weight [n, k]^T + bias [n] -> [T, n], of one dtype. A packed weight is multiplied by
        `block_weight.rounded_rows` of x."""
        ...

    def finish_layer(self, x: Tensor, mixed: Tensor, matrices: Matrices, norms: Norms, epsilon: float) -> Tensor:
        """x [T, n] += mixed [T, m] @ out^T; x += gate(norms[0](x) @ gate_up^T) @ down^T; -> norms[1](x) [T, n]."""
        ...

    def recorder(self) -> Recorder | None:
        """A new recorder for steps of these kernels; None if recording gains nothing."""
        ...

    def take(self, table: Tensor, ids: Tensor) -> Tensor:
        """The rows `ids` (int64 [R]) of `table` [N, n]: [R, n]."""
        ...

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, H, D] float32, contiguous, rounded to `dtype`."""
        ...

    def unpack(self, weight: BlockWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """The rows `ids` (int64) of a weight, or all rows, as numbers (`BlockWeight.unpacked`)."""
        ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, for x [T, n] and weight [n] of one dtype.

        `more` [T, n], the residual branch, is first added to x in place.
        """
        ...

    def rotate(self, x: Tensor, heads: int, cos_sin: Tensor) -> None:
        """Rotate channel pairs (i, i + D/2) of the first `heads` heads of x [T, H, D] in place; a row is contiguous.

        `cos_sin` [T, D] float32 holds each row's cosines [D/2] and then its sines [D/2].
        """
        ...

    def lay_out(self, matrices: Tensor) -> Tensor:
        """`matrices` [G, D, D] float32 in the order in memory that `rotate_heads` reads fastest."""
        ...

    def rotate_heads(
        self, x: Tensor, matrices: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """matrices[g] @ x[t, h] + shift[g] with g = h // (H // G), for every row t and head h: [T, H, D], contiguous.

        x [T, H, D] float32, H a multiple of G; the heads of a row are contiguous, rows may lie apart. `matrices`
        [G, D, D] float32 are contiguous or come from `lay_out`; `shift` [G, D] float32 is contiguous. The result is
        rounded to `dtype`, which is float32 where there is a shift.
        """
        ...

    def rotate_rows(self, q: Tensor, k: Tensor, v: Tensor, rotations: HeadRotations) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate Q [T, Hq, D], K and V [T, Hkv, D], these as FP16, into float32. The heads of a row are contiguous."""
        ...

    def gate(self, x: Tensor) -> Tensor:
        """silu(g) * u [T, n], where each row of x [T, 2n] is g [n] and then u [n]."""
        ...

    def set_in(self, flags: Tensor) -> list[int]:
        """The indices of `flags` [T] bool that are set. Waits for the device."""
        ...

    def append(self, pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> None:
        """Round one row per sequence, k, v [B, Hkv, D], to FP16 and write it to its place in its slot.

        A row that is not finite in FP16 sets its `faulty` [B] bool instead. The call does not wait for the device.
        """
        ...

    def narrow(self, k: Tensor, v: Tensor, spans: Spans, faulty: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a prefill batch, [T, Hkv, D], rounded to FP16, contiguous.

        A row with a value that is not finite in FP16 becomes zeros in both, and its sequence is set in `faulty` [B]
        bool. The call does not wait for the device.
        """
        ...


DEFINITION: Final = "reference"
"""The name in `PageKernels.served_by` of a format's definition, which serves where a backend has no kernels."""


class PageKernels(Protocol):
    """A backend's operations on pages of one format; each object is bound to its format.

    Methods check shapes, types and devices before they compute and raise `ValueError` naming the input. Rows are FP16:
    whatever the model computes in, K and V are rounded to FP16 once. A page's bytes are functions of its FP16 rows
    alone (and, for stochastic rounding, of seed, layer, KV head, row number and channel).
    """

    @property
    def served_by(self) -> str:
        """The name of the backend that computes, or `DEFINITION` for the format's definition; "A, B" if several do."""
        ...

    @property
    def approximation_s(self) -> float:
        """Seconds spent so far on correction terms or on dequantizing; 0 where these cannot be timed separately."""
        ...

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Zeroed planes of the pages of layers with these formats, in the resting order of these kernels.

        Each of the formats must have kernels of this object's class.
        """
        ...

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Turn full pages of rows into sealed ones.

        k, v [P, Hkv, Π, D] FP16; page_ids [P] int64; starts [P] int64, the number of each page's first row.
        """
        ...

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Write planes in wire order to the pool in its resting order, bit-exact; compute absent derived planes."""
        ...

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Every plane of the pages in wire order, contiguous."""
        ...

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Causal attention of `rows.q` over the pages of `spans` and the rows that each query sees exactly.

        A query sees its own page as the format says, the pages of `window.earlier` as FP16 rows, and the pages of
        `window.coded` in sealed form. Pages that the batch fills are sealed before the call. The slots still hold the
        rows before the batch (`Window.runs`), and in decode the new row too. Softmax scale is 1/sqrt(D). Returns
        [T, Hq, D] in q's dtype.
        """
        ...


FormatT = TypeVar("FormatT", bound=PageFormat)
KernelsT = TypeVar("KernelsT", bound=PageKernels)


class Stopwatch(Protocol):
    """Sums the time that a device spends on calls inside `with`. One thread at a time."""

    @property
    def seconds(self) -> float:
        """Seconds so far; work that the device has not finished may be missing."""
        ...

    def __enter__(self) -> None:
        """Start a measurement."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Stop the measurement and add it to the sum."""
        ...


class Backend(Protocol):
    """Kernels for one kind of device."""

    name: str
    isa: str
    """The name of what runs the kernels: the CPU's instruction set, "torch", "triton"."""
    device: torch.device
    """The device of pools and all arguments."""
    rows: RowKernels
    compiler: Compiler | None
    """What compiles kernels before they are called; None if the first call of a kernel is as fast as the others."""

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        """This backend's kernels for a page format, or the format's definition in torch where the backend has none.

        The backend's kernels are tested against the definition, which computes on the same device.
        """
        ...

    def stopwatch(self) -> Stopwatch:
        """A new stopwatch, at 0."""
        ...

    def xxh3_64(self, pieces: Sequence[Tensor], seed: int) -> list[int]:
        """XXH3-64 of each piece, as `xxhash` gives it. Waits for the device. A piece is uint8 [bytes] on `device`, of
        more than 240 bytes."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute on `threads` threads of the processor from now on, in torch too. The caller's thread counts."""
        ...
