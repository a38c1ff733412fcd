"""The sampler against a slow, plain definition of every parameter, and its promises of determinism."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model import sampler
from hackkv.model.sampler import UNIFORMS, SamplerState, draw, prompt_logprobs, sample, uniforms
from hackkv.types import Finish, Sampling

VOCAB = 24
EOS = (3, 5)
TOKENS = st.integers(0, VOCAB - 1)


def sampling(**changes: object) -> Sampling:
    return dataclasses.replace(Sampling(seed=1, max_tokens=100), **changes)  # type: ignore[arg-type]


SAMPLINGS = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64),
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 2.0])), max_size=2).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 4]),
)


@st.composite
def rows(draw_from: st.DrawFn) -> list[float]:
    """Logits with many ties, as bfloat16 gives them; some strategies of hypothesis shrink them to all equal."""
    return [draw_from(st.integers(-12, 12)) / 4 for _ in range(VOCAB)]


def adjusted(logits: Sequence[float], want: Sampling, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    row = list(logits)
    for token, bias in want.logit_bias:
        row[token] += bias
    if len(output) < want.min_tokens:
        for token in {*want.stop_token_ids, *(() if want.ignore_eos else EOS)}:
            row[token] = -math.inf
    for token in {*prompt, *output}:
        row[token] = row[token] / want.repetition_penalty if row[token] > 0 else row[token] * want.repetition_penalty
    for token in set(output):
        row[token] -= want.frequency_penalty * output.count(token) + want.presence_penalty
    return row


def plainly(logits: Sequence[float], want: Sampling, prompt: Sequence[int], output: Sequence[int]) -> int:
    """The definition, token by token and without a thought for speed."""
    row = adjusted(logits, want, prompt, output)
    ranked = sorted(range(VOCAB), key=lambda token: (-row[token], token))
    if want.temperature == 0:
        return ranked[0]
    weight = {token: math.exp((row[token] - row[ranked[0]]) / want.temperature) for token in ranked}
    ranked = [token for token in ranked if weight[token] > 0 and weight[token] >= want.min_p]
    ranked = ranked[: want.top_k or None]
    total = math.fsum(weight[token] for token in ranked)
    kept: list[int] = []
    while len(kept) < len(ranked) and (want.top_p >= 1 or math.fsum(weight[t] for t in kept) < want.top_p * total):
        kept.append(ranked[len(kept)])
    target = uniforms(want.seed, len(output), 1)[0] * math.fsum(weight[token] for token in kept)
    for count, token in enumerate(kept, start=1):
        if math.fsum(weight[t] for t in kept[:count]) > target:
            return token
    return kept[-1]


REQUESTS = st.tuples(SAMPLINGS, rows(), st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=8))


@settings(max_examples=300, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=5))
def test_equals_the_plain_definition(requests: list[tuple[Sampling, list[float], list[int], list[int]]]) -> None:
    """Each row of a mixed batch is chosen as if it were alone; states rebuilt from the output so far."""
    states = [SamplerState(want, prompt, EOS, output) for want, _, prompt, output in requests]
    logits = torch.tensor([row for _, row, _, _ in requests])
    kept = logits.clone()
    for token, (want, row, prompt, output) in zip(sample(logits, states), requests, strict=True):
        assert token.token_id == plainly(row, want, prompt, output)
        assert token.index == len(output)
        stops = {*want.stop_token_ids, *(() if want.ignore_eos else EOS)}
        assert token.finish == (Finish.STOP if token.token_id in stops else None)
    assert torch.equal(logits, kept)


@settings(max_examples=50, deadline=None)
@given(SAMPLINGS, st.integers(0, 2**32))
def test_a_replay_from_any_point_chooses_the_same(want: Sampling, noise: int) -> None:
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(noise))
    state, chosen = SamplerState(want, [1, 2], EOS), list[int]()
    for row in logits:
        chosen.append(sample(row[None], [state])[0].token_id)
    for start in range(12):
        again = SamplerState(want, [1, 2], EOS, chosen[:start])
        assert [sample(row[None], [again])[0].token_id for row in logits[start:]] == chosen[start:]


@settings(max_examples=100, deadline=None)
@given(rows(), SAMPLINGS, st.floats(0, 1, exclude_max=True))
def test_finding_the_largest_in_groups_changes_nothing(row: list[float], want: Sampling, u: float) -> None:
    """Small rows are sorted whole; with groups of 2 even these are not."""
    want = dataclasses.replace(want, temperature=max(want.temperature, 0.1))
    values = np.array(row)
    whole = draw(values, want, u)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "GROUP", 2)
        assert draw(values, want, u) == whole


@pytest.mark.parametrize(
    "want",
    [sampling(), sampling(temperature=2.0), sampling(top_p=0.8), sampling(top_k=4, top_p=0.9), sampling(min_p=0.2)],
)
def test_frequencies_follow_the_distribution(want: Sampling) -> None:
    """Chi-squared over 8,000 draws; the bound is 6 standard deviations of that statistic above its mean."""
    row = np.linspace(3, -1, 10)
    draws = 8_000
    counts = np.bincount([draw(row, want, u) for u in uniforms(want.seed, 0, draws)], minlength=10)
    weights = np.exp(row / want.temperature)
    order = 10
    if want.top_k:
        order = want.top_k
    if want.min_p:
        order = int((weights >= want.min_p * weights[0]).sum())
    mass = np.cumsum(weights[:order]) / weights[:order].sum()
    order = int((mass < want.top_p - 1e-12).sum()) + 1 if want.top_p < 1 else order
    expected = weights[:order] / weights[:order].sum() * draws
    assert counts[order:].sum() == 0
    freedom = order - 1
    assert ((counts[:order] - expected) ** 2 / expected).sum() < freedom + 6 * math.sqrt(2 * freedom)


def test_a_large_vocabulary_of_equal_logits_is_drawn_evenly() -> None:
    """All of them are candidates, and their order is that of their ids."""
    row = np.zeros(50_000)
    assert [draw(row, sampling(), u) for u in (0.0, 0.25, 0.999999)] == [0, 12_500, 49_999]


def test_masked_tokens_are_never_drawn() -> None:
    row = np.array([0.0, -math.inf, 1.0, -math.inf])
    assert {draw(row, sampling(top_p=p), u) for p in (1.0, 0.9999999) for u in np.linspace(0, 1 - 1e-16, 50)} == {0, 2}


def test_greedy_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    fast = [SamplerState(sampling(temperature=0.0), [], EOS) for _ in range(2)]
    slow = [SamplerState(sampling(temperature=0.0, logit_bias=((0, 0.0),)), [], EOS) for _ in range(2)]
    assert [token.token_id for token in sample(logits, fast)] == [1, 0]
    assert [token.token_id for token in sample(logits, slow)] == [1, 0]


def peaked(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([token]), VOCAB).float()


def test_length_stop_and_their_order() -> None:
    state = SamplerState(sampling(max_tokens=2, temperature=0.0, stop_token_ids=(9,)), [], EOS)
    assert [sample(peaked(token), [state])[0].finish for token in (1, 1)] == [None, Finish.LENGTH]
    for token in (3, 9):  # on the last token allowed, a stop token is still the reason
        state = SamplerState(sampling(max_tokens=1, temperature=0.0, stop_token_ids=(9,)), [], EOS)
        assert sample(peaked(token), [state])[0].finish == Finish.STOP
    state = SamplerState(sampling(ignore_eos=True, temperature=0.0), [], EOS)
    assert sample(peaked(3), [state])[0].finish is None


def test_min_tokens_bars_end_and_stop_tokens() -> None:
    state = SamplerState(sampling(min_tokens=2, temperature=0.0, stop_token_ids=(9,)), [], EOS)
    logits = peaked(9) + 0.5 * peaked(3) + 0.25 * peaked(7)
    assert [sample(logits, [state])[0].token_id for _ in range(3)] == [7, 7, 9]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    want = sampling(temperature=0.3, top_k=2, presence_penalty=1.0, logit_bias=((4, 5.0),), logprobs=3)
    (token,) = sample(logits, [SamplerState(want, [], EOS, [1, 2])])
    exact = logits.double().log_softmax(-1)[0]
    assert token.logprob == pytest.approx(exact[token.token_id].item(), abs=1e-9)
    best = exact.topk(3)
    assert [entry.token_id for entry in token.top] == best.indices.tolist()
    assert [entry.logprob for entry in token.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    (only,) = sample(logits, [SamplerState(sampling(logprobs=0), [], EOS)])
    assert only.logprob is not None
    assert only.top == ()


def test_prompt_logprobs() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = prompt_logprobs(logits, 5, [7, 8, 9], 1)
    exact = logits.double().log_softmax(-1)
    assert [(token.index, token.token_id) for token in tokens] == [(5, 7), (6, 8), (7, 9)]
    assert [token.logprob for token in tokens] == pytest.approx([exact[j, 7 + j].item() for j in range(3)], abs=1e-9)
    assert [token.top[0].token_id for token in tokens] == exact.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_name_their_row_and_advance_nobody(bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = bad
    states = [SamplerState(sampling(), [], EOS) for _ in range(3)]
    with pytest.raises(NonFiniteError) as caught:
        sample(logits, states)
    assert caught.value.span == 1
    assert [state.emitted for state in states] == [0, 0, 0]


def test_uniform_numbers_are_pinned() -> None:
    """Nodes of different builds must draw alike: a change here breaks replays during a rolling upgrade."""
    assert [*uniforms(0, 0, 2), *uniforms(7, 0, 1), *uniforms(-1, 0, 1)] == PINNED
    assert len(set(uniforms(5, 0, 1000))) == 1000


def test_a_state_goes_on_in_the_random_numbers_wherever_it_starts() -> None:
    whole = uniforms(5, 0, 3 * UNIFORMS)
    for start in (0, 1, UNIFORMS - 1, UNIFORMS):
        state = SamplerState(sampling(seed=5, max_tokens=1000), [], EOS, [1] * start)
        for index in (*range(start, 2 * UNIFORMS), 3 * UNIFORMS - 1):
            while state.emitted < index:
                state.accept(1)
            assert state.uniform() == whole[index]


PINNED = [0.011546754286331562, 0.5023796042735054, 0.8720734548204873, 0.23494158814525556]
