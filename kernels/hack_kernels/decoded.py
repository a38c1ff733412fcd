"""Pages that travel as codes and rest as the FP16 rows that the codes stand for: decoded once, when they arrive.

When a page is sealed, its rows become codes and then rows again. So every node attends to the same rows, whether it
made the page or received it. A page that leaves is coded anew. This loses nothing more if coding decoded rows gives
codes of the same rows, which a coder must promise. `GroupReference` promises it for centred codes. The largest value of
a decoded row is the value of a code, so the scale stays. Rounding a row to FP16 never moves a value as far as the next
code's, unless it makes the two values equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane, Planes, Pool, Rows, Spans
from hack_kernels.check import check_install, check_seal
from hack_kernels.row_format import RowFormat

SIDES: Final = ("k", "v")
LARGEST_FP16: Final = 65504.0


class RowCoder(Protocol):
    """Turns rows into codes and codes into rows (`ReadingReference`)."""

    @property
    def served_by(self) -> str:
        """The name of the backend that computes, as in `PageKernels`."""
        ...

    def quantize(self, name: str, rows: Tensor) -> Planes:
        """Rows [..., Π, D] FP16 of "k" or "v" -> the planes of that side."""
        ...

    def dequantize(self, name: str, planes: Planes) -> Tensor:
        """The planes of "k" or "v" -> rows [..., Π, D] FP32."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecodedFormat(PageFormat):
    """Pages of FP16 rows that pages of `coded` stand for."""

    head_dim: int
    page_tokens: int
    coded: PageFormat
    """The planes that travel."""

    @classmethod
    def of(cls, coded: PageFormat) -> DecodedFormat:
        """The format of rows that pages of `coded` stand for."""
        return cls(head_dim=coded.head_dim, page_tokens=coded.page_tokens, coded=coded)

    @property
    def rows(self) -> RowFormat:
        """How pages rest."""
        return RowFormat(self.head_dim, self.page_tokens, exact=False)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Rows of K, then of V."""
        return self.rows.planes


class DecodedKernels:
    """Implements `PageKernels` over the kernels of FP16 rows (`below`). The coder makes and reads codes."""

    def __init__(self, fmt: DecodedFormat, coder: RowCoder, below: PageKernels) -> None:
        self._fmt, self._coder, self._below = fmt, coder, below

    @property
    def served_by(self) -> str:
        """The backend that attends to rows, and the backend that codes them."""
        return ", ".join(dict.fromkeys((self._below.served_by, self._coder.served_by)))

    @property
    def approximation_s(self) -> float:
        """The time that the kernels below report. Decoding is not in it: pages are decoded before they rest."""
        return self._below.approximation_s

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """The planes of FP16 rows."""
        return self._below.new_planes([cast(DecodedFormat, fmt).rows for fmt in formats], num_pages, num_kv_heads)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Code the rows, and keep the rows that the codes stand for."""
        check_seal(self._fmt, pool, page_ids, starts, k, v)
        rows = self._decoded(self._coder.quantize("k", k) | self._coder.quantize("v", v))
        self._below.seal(layer, pool, page_ids, starts, rows["k"], rows["v"])

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Decode received codes into rows. Raises `ValueError`."""
        check_install(self._fmt.coded, pool, page_ids, planes)
        self._below.install(pool, page_ids, self._decoded(planes))

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Code the rows again."""
        rows = self._below.export(pool, page_ids)
        return self._coder.quantize("k", rows["k"]) | self._coder.quantize("v", rows["v"])

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention to the decoded rows, by the kernels below."""
        return self._below.attend(layer, pool, spans, rows)

    def _decoded(self, planes: Planes) -> Planes:
        """Rows [..., Π, D] FP16. Codes that no coder wrote may stand for more than FP16 holds."""
        rows = {name: self._coder.dequantize(name, planes) for name in SIDES}
        return {name: x.clamp(-LARGEST_FP16, LARGEST_FP16).half() for name, x in rows.items()}
