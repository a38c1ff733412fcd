"""The contract of a codec, checked for every entry of `CODECS` on every backend.

Above all the open-page rule: the same K and V rows give the same cache bytes and, up to the order of float sums, the
same outputs, whether they came by prefill, by decode or by replay, in whatever chunks and beside whatever neighbours.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hackkv.batch import Batch, Span, non_finite
from tests.codecs.cases import (
    HEADS,
    LAYER,
    Case,
    Growing,
    advance,
    assert_same,
    cache_of,
    every_case,
    rows,
    run,
    same_bytes,
    table,
)


@every_case
def test_a_decode_grown_cache_equals_the_prefill_built_one(case: Case) -> None:
    """Row by row equals all at once, at n = Π-1, Π, Π+1 and 2Π: sealed pages, open rows and outputs."""
    pi, codec = case.page_tokens, case.codec
    pool, grown = codec.new_pools(2, 1, range(HEADS))[LAYER], Growing(case, codec, 2 * pi)
    for tokens in (pi - 1, pi, pi + 1, 2 * pi):
        before = tokens - 34 - grown.done  # long pages: the rows around the boundary one by one, those before at once
        for count in ([before] if before > 0 else []) + [1] * min(34, tokens - grown.done):
            advance(pool, [(grown, count)])
        whole_pool, whole = codec.new_pools(2, 1, range(HEADS))[LAYER], Growing(case, codec, 2 * pi)
        advance(whole_pool, [(whole, tokens)])
        assert_same(cache_of(codec, pool, grown), cache_of(codec, whole_pool, whole))


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


@pytest.mark.grid(together=1, kinds=True)
@table
def test_nothing_depends_on_any_chunking(case: Case) -> None:
    """101 tokens over four pages of 32 are cut anywhere. Single rows go through decode, the others through prefill."""
    whole = run(case, 101, [101])

    @settings(max_examples=20)
    @given(cuts=st.sets(st.integers(1, 100), max_size=30))
    def holds(cuts: set[int]) -> None:
        bounds = [0, *sorted(cuts), 101]
        assert_same(run(case, 101, [stop - start for start, stop in pairwise(bounds)]), whole)

    holds()


@every_case
def test_nothing_depends_on_batch_neighbours_or_place(case: Case) -> None:
    """Three sequences in shared passes, in other pages and slots, equal each sequence alone."""
    pi, codec = case.page_tokens, case.codec
    lengths = (pi + 3, 2 * pi, 2)
    pool = codec.new_pools(8, 4, range(HEADS))[LAYER]
    sequences = [Growing(case, codec, n, seed=10 * i, slot=3 - i, first=2 * i + 1) for i, n in enumerate(lengths)]
    advance(pool, [(sequences[1], pi), (sequences[0], pi)])
    advance(pool, [(sequences[0], 2), (sequences[2], 1), (sequences[1], pi - 1)])
    advance(pool, [(sequence, 1) for sequence in sequences])
    for i, (sequence, tokens) in enumerate(zip(sequences, lengths, strict=True)):
        alone_pool = codec.new_pools(2, 1, range(HEADS))[LAYER]
        alone = Growing(case, codec, tokens, seed=10 * i)
        advance(alone_pool, [(alone, tokens)])
        assert_same(cache_of(codec, pool, sequence), cache_of(codec, alone_pool, alone))


@every_case
def test_a_process_that_holds_some_heads_seals_what_one_with_all_of_them_does(case: Case) -> None:
    """Each has a prompt, decode and a seal. Stochastic rounding depends on heads of the model, not of the process."""
    pi, codec = case.page_tokens, case.codec
    whole, part = codec.new_pools(4, 1, range(HEADS))[LAYER], codec.new_pools(4, 1, range(1, HEADS))[LAYER]
    sequence, cut = (Growing(case, codec, 2 * pi) for _ in range(2))
    cut.q, cut.k, cut.v = cut.q[:, case.group :], cut.k[:, 1:], cut.v[:, 1:]
    for pool, each in ((whole, sequence), (part, cut)):
        for count in (2 * pi - 1, 1):
            advance(pool, [(each, count)])
    planes, _, out = cache_of(codec, whole, sequence)
    cut_planes, _, cut_out = cache_of(codec, part, cut)
    assert all(same_bytes(cut_planes[name], plane[1:]) for name, plane in planes.items())
    assert float((cut_out - out[:, case.group :]).norm() / out.norm()) <= 1e-5


@every_case
def test_a_pass_may_be_repeated(case: Case) -> None:
    """A pass that failed in another layer runs again: whole pages, a last chunk, and decode over a seal."""
    pi = case.page_tokens
    counts = [2 * pi, pi - 1, 1, 1]
    tokens = sum(counts)
    assert_same(run(case, tokens, counts, repeat=2), run(case, tokens, counts))


@every_case
def test_the_wire_is_bit_exact(case: Case) -> None:
    """Pages go from one pool to other page ids of others, whole and by KV-head ranges. Attention goes on unchanged."""
    pi, codec = case.page_tokens, case.codec
    tokens = 2 * pi + 3
    pool, sequence = codec.new_pools(4, 1, range(HEADS))[LAYER], Growing(case, codec, tokens + 1)
    advance(pool, [(sequence, tokens)])
    source, ids = torch.tensor(sequence.pages[:2]), (6, 1)
    sent = codec.to_wire(LAYER, pool, source)
    target, by_heads = codec.new_pools(8, 1, range(HEADS))[LAYER], codec.new_pools(8, 1, range(HEADS))[LAYER]
    codec.from_wire(LAYER, target, torch.tensor(ids), sent)
    for head in range(HEADS):
        part = codec.to_wire(LAYER, pool.heads(head, 1), source)
        assert all(torch.equal(part[name], plane[head : head + 1]) for name, plane in sent.items())
        codec.from_wire(LAYER, by_heads.heads(head, 1), torch.tensor(ids), part)
    for landed in (target, by_heads):
        for name, plane in codec.to_wire(LAYER, landed, torch.tensor(ids)).items():
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


@pytest.mark.grid
@table
@pytest.mark.parametrize("name", ["K", "V"])
@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf"), (7e4, "70000, beyond FP16")],
)
def test_in_prefill_what_is_not_finite_is_flagged_and_the_others_are_served(
    case: Case, name: str, value: float, said: str
) -> None:
    """Neighbours get the same bytes and outputs as without it. Zeros are written in its place; the error names it."""
    pi, codec, runs = case.page_tokens, case.codec, []
    for broken in (False, True):
        pool = codec.new_pools(8, 2, range(HEADS))[LAYER]
        good, bad = (Growing(case, codec, pi + 2, seed=10 * i, slot=i, first=4 * i) for i in range(2))
        parts = [good.next(pi + 1), bad.next(pi + 2)]
        batch = Batch.of([span for span, _ in parts], pi)
        q, k, v = (torch.cat([rest[i] for _, rest in parts]) for i in range(3))
        if broken:
            {"K": k, "V": v}[name][pi + 1 + 9, 1, 3] = value
        out = codec.attend(LAYER, pool, batch, q, k, v)
        assert batch.faulty.tolist() == [False, broken]
        if broken:
            error = non_finite(LAYER, batch, k, v)
            assert str(error) == f"layer {LAYER}: {name} is {said} at token 9, KV head 1"
            assert error.span == 1
        good.outputs.append(out[: pi + 1])
        good.done += pi + 1
        runs.append(cache_of(codec, pool, good))
        assert all(bool(x.isfinite().all()) for x in (pool.open_k, pool.open_v))
    assert_same(runs[1], runs[0])


@pytest.mark.grid
@table
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
@pytest.mark.parametrize("name", ["k", "v"])
def test_in_decode_a_row_that_is_not_finite_is_flagged_and_the_others_are_served(
    case: Case, name: str, value: float
) -> None:
    """The step does not wait for the check. Neighbours get the same bytes and outputs as without the row, even if both
    fill a page. Values that are not finite are written nowhere."""
    pi, codec, runs = case.page_tokens, case.codec, []
    for broken in (False, True):
        pool = codec.new_pools(8, 2, range(HEADS))[LAYER]
        bad, good = (Growing(case, codec, pi + 1, seed=10 * i, slot=i, first=4 * i) for i in range(2))
        advance(pool, [(bad, pi - 1), (good, pi - 1)])
        parts = [bad.next(1), good.next(1)]
        batch = Batch.of([span for span, _ in parts], pi)
        q, k, v = (torch.cat([rest[i] for _, rest in parts]) for i in range(3))
        if broken:
            {"k": k, "v": v}[name][0, 1, 3] = value
        out = codec.attend(LAYER, pool, batch, q, k, v)
        assert batch.faulty.tolist() == [broken, False]
        good.outputs.append(out[1:])
        good.done += 1
        runs.append(cache_of(codec, pool, good))
        assert all(bool(x.isfinite().all()) for x in (pool.open_k, pool.open_v))
    assert_same(runs[1], runs[0])


@table
def test_the_largest_fp16_value_is_not_refused(case: Case) -> None:
    codec = case.codec
    pool, sequence = codec.new_pools(2, 1, range(HEADS))[LAYER], Growing(case, codec, case.page_tokens + 1)
    sequence.k, sequence.v = sequence.k.clone(), sequence.v.clone()
    sequence.k[3, 0, 5], sequence.v[4, 1, 6] = 65504.0, -65504.0
    advance(pool, [(sequence, case.page_tokens + 1)])
    assert bool(torch.isfinite(sequence.outputs[0]).all())


@table
def test_outputs_have_the_dtype_of_the_query(case: Case) -> None:
    """A prompt and then a row of decode."""
    codec = case.codec
    pool = codec.new_pools(2, 1, range(HEADS))[LAYER]
    for held, count in ((0, 5), (5, 1)):
        batch = Batch.of([Span(0, held, count, (0,))], case.page_tokens)
        q, k, v = (rows(i, count, HEADS * case.group if i == 0 else HEADS, case.head_dim).bfloat16() for i in range(3))
        out = codec.attend(LAYER, pool, batch, q, k, v)
        assert (out.dtype, out.shape) == (torch.bfloat16, q.shape)


@table
def test_time_is_counted(case: Case) -> None:
    """Sealing and attention are timed apart. Corrections are part of attention."""
    codec = case.codec
    pool, sequence = codec.new_pools(2, 1, range(HEADS))[LAYER], Growing(case, codec, 2 * case.page_tokens)
    assert (codec.quantize_s, codec.attend_s) == (0, 0)
    advance(pool, [(sequence, 2 * case.page_tokens)])
    assert codec.quantize_s > 0
    assert codec.attend_s >= codec.approximation_s >= 0
