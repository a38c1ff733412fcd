"""The contract of a codec, held against every entry of `CODECS` on every backend.

Above all the open-page rule: the same K and V rows give the same cache bytes and, up to the order of float sums, the
same outputs, whether they came by prefill, by decode or by replay, in whatever chunks and beside whatever neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hack_kernels import AUTO, load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv.codec import Batch, KvCodec, LayerPages, Span
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError, NonFiniteError

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

    def __str__(self) -> str:
        words = [self.name, f"pi{self.page_tokens}", f"d{self.head_dim}", f"g{self.group}", self.backend]
        return "-".join((*words, *(f"{key}={value}" for key, value in self.settings.items())))

    @property
    def codec(self) -> KvCodec:
        """A new codec."""
        settings = {"page_tokens": self.page_tokens, **self.settings}
        return make_codec(CodecConfig(name=self.name, settings=settings), self.head_dim, load(self.backend))


# Backends of the processor: those of a GPU are interpreted here, and tests/hack_kernels compares them byte for byte.
TABLE = [Case(name, backend=backend) for name in CODECS for backend in AUTO]
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
]
CASES = [*TABLE, *VARIANTS]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
table = pytest.mark.parametrize("case", TABLE, ids=str)


@cache
def rows(seed: int, tokens: int, heads: int, head_dim: int) -> Tensor:
    """Gaussian rows [tokens, heads, head_dim] with a few loud channels, as real keys have."""
    x = torch.randn((tokens, heads, head_dim), generator=torch.Generator().manual_seed(seed))
    x[..., :2] *= 8
    return x


class Growing:
    """One sequence in a pool: rows go in by spans of any size, outputs are kept by position."""

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


def advance(pool: LayerPages, steps: Sequence[tuple[Growing, int]], repeat: int = 1) -> None:
    """One pass over several sequences; `repeat` calls it so often with the same batch."""
    parts = [sequence.next(count) for sequence, count in steps]
    codec = steps[0][0].codec
    batch = Batch.of([span for span, _ in parts], codec.format.page_tokens)
    q, k, v = (torch.cat([part[i] for _, part in parts]) for i in range(3))
    for _ in range(repeat):
        out = codec.attend(LAYER, pool, batch, q, k, v)
    for (sequence, count), rest in zip(steps, out.split([count for _, count in steps]), strict=True):
        sequence.outputs.append(rest)
        sequence.done += count


def run(
    case: Case, tokens: int, counts: Sequence[int], repeat: int = 1
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Feed a sequence alone in spans of `counts`; returns its sealed pages, open rows and outputs."""
    assert sum(counts) == tokens
    codec = case.codec
    pool = codec.new_layer(8, 2, HEADS)
    sequence = Growing(case, codec, tokens)
    for count in counts:
        advance(pool, [(sequence, count)], repeat)
    return cache_of(codec, pool, sequence)


def cache_of(
    codec: KvCodec, pool: LayerPages, sequence: Growing
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Everything that a sequence left behind, in wire order."""
    full, rest = divmod(sequence.done, codec.format.page_tokens)
    sealed = codec.to_wire(pool, torch.tensor(sequence.pages[:full], dtype=torch.int64))
    open_rows = (pool.open_k[sequence.slot, :, :rest].clone(), pool.open_v[sequence.slot, :, :rest].clone())
    return sealed, open_rows, torch.cat(sequence.outputs)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Equal to the last bit, unlike `torch.equal`, for which 0.0 is -0.0."""
    flat = [z.contiguous().flatten().view(torch.uint8) for z in (x, y)]
    return (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(flat[0], flat[1])


def assert_same(
    found: tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor],
    wanted: tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor],
) -> None:
    """Bytes equal; outputs equal up to the order of float sums."""
    assert found[0].keys() == wanted[0].keys()
    for name, plane in wanted[0].items():
        assert same_bytes(found[0][name], plane), name
    for found_rows, wanted_rows in zip(found[1], wanted[1], strict=True):
        assert same_bytes(found_rows, wanted_rows)
    error = (found[2] - wanted[2]).norm() / wanted[2].norm()
    assert float(error) <= 1e-5, f"outputs differ by {float(error)}"


@every_case
@pytest.mark.parametrize("boundary", [(1, -1), (1, 0), (1, 1), (2, 0)], ids=["pi-1", "pi", "pi+1", "2pi"])
def test_a_decode_grown_cache_equals_the_prefill_built_one(case: Case, boundary: tuple[int, int]) -> None:
    """Row by row against all at once, at n = Π-1, Π, Π+1 and 2Π: sealed pages, open rows and outputs."""
    pages, more = boundary
    tokens = pages * case.page_tokens + more
    first = max(0, tokens - 34)  # long pages: the rows around the boundary one by one, those before at once
    assert_same(
        run(case, tokens, [first, *[1] * (tokens - first)] if first else [1] * tokens), run(case, tokens, [tokens])
    )


@every_case
def test_nothing_depends_on_chunking(case: Case) -> None:
    """Chunks of 1, 2 and 8 pages, and chunks that start and end inside pages."""
    pi = case.page_tokens
    tokens = 3 * pi + 5
    whole = run(case, tokens, [tokens])
    for counts in (
        [pi, pi, pi, 5],
        [2 * pi, pi + 5],
        [pi + 1, pi + 1, pi + 3],
        [7, 1, 2 * pi - 9, pi + 6],
        [pi - 1, 1, 2 * pi + 5],
    ):
        assert_same(run(case, tokens, counts), whole)


@table
@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 100), max_size=30))
def test_nothing_depends_on_any_chunking(case: Case, cuts: set[int]) -> None:
    """101 tokens over four pages of 32, cut anywhere: single rows go through decode, the rest through prefill."""
    bounds = [0, *sorted(cuts), 101]
    assert_same(run(case, 101, [stop - start for start, stop in pairwise(bounds)]), run(case, 101, [101]))


@every_case
def test_nothing_depends_on_batch_neighbours_or_place(case: Case) -> None:
    """Three sequences through shared passes, in other pages and slots, against each one alone."""
    pi, codec = case.page_tokens, case.codec
    lengths = (pi + 3, 2 * pi, 2)
    pool = codec.new_layer(8, 4, HEADS)
    sequences = [Growing(case, codec, n, seed=10 * i, slot=3 - i, first=2 * i + 1) for i, n in enumerate(lengths)]
    advance(pool, [(sequences[1], pi), (sequences[0], pi)])
    advance(pool, [(sequences[0], 2), (sequences[2], 1), (sequences[1], pi - 1)])
    advance(pool, [(sequence, 1) for sequence in sequences])
    for i, (sequence, tokens) in enumerate(zip(sequences, lengths, strict=True)):
        alone_pool = codec.new_layer(2, 1, HEADS)
        alone = Growing(case, codec, tokens, seed=10 * i)
        advance(alone_pool, [(alone, tokens)])
        assert_same(cache_of(codec, pool, sequence), cache_of(codec, alone_pool, alone))


@every_case
def test_a_pass_may_be_repeated(case: Case) -> None:
    """A pass that failed in another layer runs again: whole pages, a last chunk, and decode over a seal."""
    pi = case.page_tokens
    counts = [2 * pi, pi - 1, 1, 1]
    tokens = sum(counts)
    assert_same(run(case, tokens, counts, repeat=2), run(case, tokens, counts))


@every_case
def test_the_wire_is_bit_exact(case: Case) -> None:
    """Out of one pool, into others at other page ids, whole and by KV-head ranges; attention goes on unchanged."""
    pi, codec = case.page_tokens, case.codec
    tokens = 2 * pi + 3
    pool, sequence = codec.new_layer(4, 1, HEADS), Growing(case, codec, tokens + 1)
    advance(pool, [(sequence, tokens)])
    source, ids = torch.tensor(sequence.pages[:2]), (6, 1)
    sent = codec.to_wire(pool, source)
    target, by_heads = codec.new_layer(8, 1, HEADS), codec.new_layer(8, 1, HEADS)
    codec.from_wire(target, torch.tensor(ids), sent)
    for head in range(HEADS):
        part = codec.to_wire(pool.heads(head, 1), source)
        assert all(torch.equal(part[name], plane[head : head + 1]) for name, plane in sent.items())
        codec.from_wire(by_heads.heads(head, 1), torch.tensor(ids), part)
    for landed in (target, by_heads):
        for name, plane in codec.to_wire(landed, torch.tensor(ids)).items():
            assert same_bytes(plane, sent[name]), name
        for name, resting in landed.planes.items():
            assert torch.equal(resting[list(ids)], pool.planes[name][source]), f"{name} was not derived again"
        landed.open_k[0], landed.open_v[0] = pool.open_k[0], pool.open_v[0]
    _, row = sequence.next(1)
    outputs = [
        codec.attend(LAYER, where, Batch.of([Span(0, tokens, 1, pages)], pi), *row)
        for where, pages in ((pool, sequence.pages), (target, (*ids, 0)), (by_heads, (*ids, 0)))
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@table
@pytest.mark.parametrize("name", ["K", "V"])
@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf"), (7e4, "70000, beyond FP16")],
)
def test_what_is_not_finite_is_refused_by_name_and_nothing_is_written(
    case: Case, name: str, value: float, said: str
) -> None:
    codec, pi = case.codec, case.page_tokens
    pool = codec.new_layer(4, 2, HEADS)
    batch = Batch.of([Span(0, pi - 1, 2, (0, 1)), Span(1, 5, pi, (2, 3))], pi)
    q, k, v = (rows(i, pi + 2, HEADS * case.group if i == 0 else HEADS, case.head_dim).clone() for i in range(3))
    {"K": k, "V": v}[name][2 + 9, 1, 3] = value
    before = [plane.clone() for plane in (*pool.planes.values(), pool.open_k, pool.open_v)]
    with pytest.raises(NonFiniteError) as caught:
        codec.attend(LAYER, pool, batch, q, k, v)
    assert str(caught.value) == f"layer {LAYER}: {name} is {said} at token 14, KV head 1"
    assert caught.value.span == 1
    after = (*pool.planes.values(), pool.open_k, pool.open_v)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@table
def test_the_largest_fp16_value_is_not_refused(case: Case) -> None:
    codec = case.codec
    pool, sequence = codec.new_layer(2, 1, HEADS), Growing(case, codec, case.page_tokens + 1)
    sequence.k, sequence.v = sequence.k.clone(), sequence.v.clone()
    sequence.k[3, 0, 5], sequence.v[4, 1, 6] = 65504.0, -65504.0
    advance(pool, [(sequence, case.page_tokens + 1)])
    assert bool(torch.isfinite(sequence.outputs[0]).all())


@table
def test_outputs_have_the_dtype_of_the_query(case: Case) -> None:
    codec = case.codec
    pool = codec.new_layer(2, 1, HEADS)
    batch = Batch.of([Span(0, 0, 5, (0,))], case.page_tokens)
    q, k, v = (rows(i, 5, HEADS * case.group if i == 0 else HEADS, case.head_dim).bfloat16() for i in range(3))
    out = codec.attend(LAYER, pool, batch, q, k, v)
    assert (out.dtype, out.shape) == (torch.bfloat16, q.shape)


@table
def test_time_is_counted(case: Case) -> None:
    """Sealing and attention apart; corrections lie within attention."""
    codec = case.codec
    pool, sequence = codec.new_layer(2, 1, HEADS), Growing(case, codec, 2 * case.page_tokens)
    assert (codec.quantize_s, codec.attend_s) == (0, 0)
    advance(pool, [(sequence, 2 * case.page_tokens)])
    assert codec.quantize_s > 0
    assert codec.attend_s >= codec.approximation_s >= 0


def test_four_bits_for_k_are_closer_to_exact_than_two() -> None:
    """On keys with loud channels: `hack-k4v2` < `hack` against `fp16`, and neither is far off."""
    tokens = 7 * 32
    exact, two, four = (run(Case(name), tokens, [tokens])[2] for name in ("fp16", "hack", "hack-k4v2"))
    errors = [float((x - exact).norm() / exact.norm()) for x in (two, four)]
    assert errors[1] < errors[0] < 0.9


@pytest.mark.parametrize("arithmetic", ["symmetric", "asymmetric"])
def test_requantization_gives_every_row_to_the_codes(arithmetic: str) -> None:
    """Ablation HACK/RQE: all pages travel as planes, and decode goes on where prefill ended, on either node."""
    case = Case("hack", settings={"open_page": "requantize", "arithmetic": arithmetic})
    codec, pi = case.codec, case.page_tokens
    tokens = pi + 9
    pool, sequence = codec.new_layer(4, 1, HEADS), Growing(case, codec, tokens + 3)
    advance(pool, [(sequence, tokens)])
    assert [codec.sealed_pages(n) for n in (1, pi, pi + 1, tokens)] == [1, 1, 2, 2]
    target = codec.new_layer(4, 1, HEADS)
    codec.from_wire(target, torch.tensor([3, 1]), codec.to_wire(pool, torch.tensor(sequence.pages[:2])))
    moved = replace_place(sequence, (3, 1))
    for _ in range(3):
        advance(pool, [(sequence, 1)])
        advance(target, [(moved, 1)])
        assert torch.equal(sequence.outputs[-1], moved.outputs[-1])
    exact = run(replace(case, name="fp16", settings={}), tokens + 3, [tokens + 3])[2]
    assert float((torch.cat(sequence.outputs) - exact).norm() / exact.norm()) < 0.9


def replace_place(sequence: Growing, pages: tuple[int, ...]) -> Growing:
    """The same sequence, at the same point, in other pages."""
    moved = object.__new__(Growing)
    moved.__dict__.update(sequence.__dict__, pages=pages, outputs=[])
    return moved


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("hakc", {}, "codec.name: 'hakc' is unknown; known: fp16, hack"),
        ("hack", {"page_tokens": 48}, "page_tokens is 48"),
        ("hack", {"k_bits": 3}, "k_bits is 3"),
        ("hack", {"v_bits": "two"}, "codec.settings.v_bits"),
        ("hack", {"rounding": "up"}, "codec.settings.rounding"),
        ("hack", {"arithmetic": "fp8"}, "codec.settings.arithmetic"),
        ("hack", {"open_page": "none"}, "codec.settings.open_page"),
        ("hack", {"seed": -1}, "codec.settings.seed"),
        ("hack", {"seed": 2**64}, "codec.settings.seed"),
        ("hack", {"bits": 2}, "codec.settings.bits"),
        ("hack", {"send_sums": True}, "send_sums is set, but these settings keep no sums"),
        ("hack-paper", {"send_sums": True, "stored_sums": False}, "send_sums"),
        ("fp16", {"page_tokens": 0}, "codec.settings.page_tokens"),
        ("fp16", {"page_tokens": 9}, "codec.settings.page_tokens"),
        ("fp16", {"k_bits": 2}, "codec.settings.k_bits"),
    ],
)
def test_unknown_codecs_and_bad_settings_are_named(name: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_codec(CodecConfig(name=name, settings=settings), 128, load("reference"))
    assert named in str(caught.value)


def test_a_head_dim_without_kernels_is_named() -> None:
    with pytest.raises(ConfigError, match="head_dim is 80"):
        make_codec(CodecConfig(name="hack"), 80, load("reference"))


def test_fingerprints_differ_when_anything_that_matters_differs() -> None:
    """And are equal for equal settings, on every backend."""
    cases = [
        *TABLE,
        *(Case("hack", settings={"k_bits": 4, **more}) for more in ({}, {"v_bits": 4}, {"seed": 1})),
        *(Case("hack", settings={"rounding": "stochastic", "seed": seed}) for seed in (0, 1)),
        Case("hack", page_tokens=64),
        Case("fp16", page_tokens=64),
        *(Case("hack", settings={"open_page": mode}) for mode in ("k_codes", "requantize")),
        *(Case("hack-paper", settings={key: key == "send_sums"}) for key in ("send_sums", "stored_sums")),
    ]
    prints = {frozenset(case.codec.fingerprint()) for case in cases}
    assert len(prints) == len({str(replace(case, backend="")) for case in cases})
    for case in cases:
        names = [name for name, _ in case.codec.fingerprint()]
        assert len(set(names)) == len(names)
        assert case.codec.fingerprint() == case.codec.fingerprint()
