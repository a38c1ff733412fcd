"""Codecs with settings on backends, and sequences that grow in their pools. Fixtures for tests of codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hack_kernels import AUTO, load
from hack_kernels.base import Pool
from torch import Tensor

from hackkv.batch import Batch, Span
from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.types import KvShape
from tests.codecs.calibrations import calibration_file

HEADS = 2
LAYER = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One codec with settings, on one backend, for one model shape."""

    name: str
    page_tokens: int = 32
    head_dim: int = 64
    group: int = 2
    backend: str = "reference"
    settings: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    """Whether the setting `calibration` names a file of random tensors."""

    def __str__(self) -> str:
        words = [self.name, f"pi{self.page_tokens}", f"d{self.head_dim}", f"g{self.group}", self.backend]
        words += [f"{key}={value}" for key, value in self.settings.items()]
        return "-".join((*words, *["calibrated"] * self.calibrated))

    @property
    def codec(self) -> KvCodec:
        """A new codec."""
        settings = {"page_tokens": self.page_tokens, **self.settings}
        if self.calibrated:
            settings["calibration"] = str(calibration_file(LAYER + 1, HEADS, self.head_dim, self.name.split("-")[0]))
        return make_codec(
            CodecConfig(name=self.name, settings=settings), KvShape(LAYER + 1, HEADS, self.head_dim), load(self.backend)
        )


# Only backends of the CPU: those of a GPU would be interpreted here, and tests/hack_kernels compares their bytes.
TABLE = [Case(name, backend=backend) for name in CODECS for backend in AUTO]
CODED: dict[str, Any] = {"sink": 0, "recent": 0}
"""Settings of `rot-*` with which queries see every page except their own as codes."""
VARIANTS = [
    *(Case("hack", page_tokens=pi, head_dim=d) for pi, d in [(64, 64), (128, 64), (64, 96), (128, 96), (32, 128)]),
    Case("hack", 64, 256, group=1),
    Case("hack-paper", 64, 96, group=3),
    Case("hack-paper", 128, 128, group=1),
    Case("fp16", 64, 96, group=3),
    *(Case("hack", group=group) for group in (1, 3, 7)),
    Case("hack", settings={"rounding": "stochastic", "seed": 2**64 - 1}),
    Case("hack", settings={"arithmetic": "asymmetric"}),
    Case("hack", settings={"arithmetic": "asymmetric", "stored_sums": False, "v_bits": 4}),
    Case("hack", settings={"open_page": "k_codes"}),
    Case("hack-paper", settings={"send_sums": True}),
    Case("hack-paper", settings={"k_bits": 4, "v_bits": 4}),
    *(
        Case("rot-k3v2", page_tokens=pi, head_dim=d, group=g, settings=CODED)
        for pi, d, g in [(64, 96, 1), (128, 128, 7), (32, 256, 3), (64, 80, 2)]
    ),
    Case("rot-k3v2", settings=CODED, calibrated=True),
    Case("rot-k4v4", 64, 96, group=3, calibrated=True),
    Case("rot-k3v2", group=3, settings={"exact_layers": LAYER}),
    Case("rot-k3v2", settings={"scales": "fp8", **CODED}, calibrated=True),
    *(
        Case("kvquant-2", pi, d, settings={"k_bits": bits, "v_bits": 3}, calibrated=True)
        for pi, d, bits in [(32, 64, 2), (64, 128, 3)]
    ),
    Case("kvquant-4", 64, 96, group=3, settings={"k_bits": 3, "v_bits": 3}),
    Case("rot-k2v2", settings={"k_bits": 8, "v_bits": 8, **CODED}),
]
"""Other settings and shapes. The definitions in torch are slow, so theirs are slow tests."""
CASES = [
    *TABLE,
    *(
        pytest.param(replace(case, backend=backend), marks=[pytest.mark.slow] if backend == "reference" else [])
        for case in VARIANTS
        for backend in AUTO
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
table = pytest.mark.parametrize("case", TABLE, ids=str)


@cache
def rows(seed: int, tokens: int, heads: int, head_dim: int) -> Tensor:
    """Gaussian rows [tokens, heads, head_dim] with a few large channels, like real keys."""
    x = torch.randn((tokens, heads, head_dim), generator=torch.Generator().manual_seed(seed))
    x[..., :2] *= 8
    return x


class Growing:
    """One sequence in a pool. Rows enter in spans of any size; outputs are kept in order."""

    def __init__(
        self, case: Case, codec: KvCodec, tokens: int, *, seed: int = 0, slot: int = 0, first: int = 0
    ) -> None:
        self.codec, self.slot, self.done = codec, slot, 0
        self.pages = tuple(range(first, first + -(-tokens // case.page_tokens)))
        self.q = rows(seed, tokens, HEADS * case.group, case.head_dim)
        self.k = rows(seed + 1, tokens, HEADS, case.head_dim)
        self.v = rows(seed + 2, tokens, HEADS, case.head_dim)
        self.outputs: list[Tensor] = []

    def next(self, count: int) -> tuple[Span, tuple[Tensor, Tensor, Tensor]]:
        """The span of the next rows, and the rows."""
        part = slice(self.done, self.done + count)
        return Span(self.slot, self.done, count, self.pages), (self.q[part], self.k[part], self.v[part])


def advance(pool: Pool, steps: Sequence[tuple[Growing, int]], repeat: int = 1) -> None:
    """Run one pass over several sequences, `repeat` times with the same batch."""
    parts = [sequence.next(count) for sequence, count in steps]
    codec = steps[0][0].codec
    batch = Batch.of([span for span, _ in parts], codec.page_tokens)
    q, k, v = (torch.cat([part[i] for _, part in parts]) for i in range(3))
    for _ in range(repeat):
        out = codec.attend(LAYER, pool, batch, q, k, v)
    for (sequence, count), rest in zip(steps, out.split([count for _, count in steps]), strict=True):
        sequence.outputs.append(rest)
        sequence.done += count


def run(
    case: Case, tokens: int, counts: Sequence[int], repeat: int = 1
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Feed a sequence alone in spans of `counts`; return its sealed pages, exact rows and outputs."""
    assert sum(counts) == tokens
    codec = case.codec
    pool = codec.new_pools(8, 2, range(HEADS))[LAYER]
    sequence = Growing(case, codec, tokens)
    for count in counts:
        advance(pool, [(sequence, count)], repeat)
    return cache_of(codec, pool, sequence)


def cache_of(codec: KvCodec, pool: Pool, sequence: Growing) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor]:
    """The sealed pages, in wire order, the exact rows and the outputs of a sequence."""
    full = sequence.done // codec.page_tokens
    sealed = codec.to_wire(LAYER, pool, torch.tensor(sequence.pages[:full], dtype=torch.int64))
    runs = codec.window.runs(sequence.done, codec.page_tokens)
    kept = [[slots[sequence.slot, :, run] for run in runs] for slots in (pool.open_k, pool.open_v)]
    exact = [torch.cat(parts, 1) if parts else pool.open_k[sequence.slot, :, :0] for parts in kept]
    return sealed, (exact[0], exact[1]), torch.cat(sequence.outputs)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether all bits are equal. For `torch.equal`, 0.0 equals -0.0."""
    flat = [z.contiguous().flatten().view(torch.uint8) for z in (x, y)]
    return (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(flat[0], flat[1])


def assert_same(
    found: tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor],
    wanted: tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor],
) -> None:
    """Assert that bytes are equal, and outputs equal up to the order of float sums."""
    assert found[0].keys() == wanted[0].keys()
    for name, plane in wanted[0].items():
        assert same_bytes(found[0][name], plane), name
    for found_rows, wanted_rows in zip(found[1], wanted[1], strict=True):
        assert same_bytes(found_rows, wanted_rows)
    error = (found[2] - wanted[2]).norm() / wanted[2].norm()
    assert float(error) <= 1e-5, f"outputs differ by {float(error)}"
