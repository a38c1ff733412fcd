"""The sampler against a slow, plain definition of every parameter, and its promises of determinism."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hack_kernels import load
from hack_kernels.base import RowKernels
from hack_kernels.choosing import uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.guide import Bits, Guide
from hackkv.logprobs import PromptLogprobs
from hackkv.model.sampler import SamplerState, sample
from hackkv.types import Finish, Sampling

BACKENDS = {name: load(name).rows for name in ("reference", "cpu")}
every = pytest.mark.parametrize("kernels", BACKENDS.values(), ids=BACKENDS.keys())

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
    """Logits with many ties, like those in bfloat16. Hypothesis may shrink them until all are equal."""
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
    """The definition, computed token by token, without regard to speed."""
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
    target = uniform(want.seed % 2**64, len(output)) * math.fsum(weight[token] for token in kept)
    for count, token in enumerate(kept, start=1):
        if math.fsum(weight[t] for t in kept[:count]) > target:
            return token
    return kept[-1]


REQUESTS = st.tuples(SAMPLINGS, rows(), st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=8))


@settings(max_examples=300)
@given(st.lists(REQUESTS, min_size=1, max_size=5))
def test_equals_the_plain_definition(requests: list[tuple[Sampling, list[float], list[int], list[int]]]) -> None:
    """Each row of a mixed batch is chosen as if alone. States are rebuilt from the output so far."""
    logits = torch.tensor([row for _, row, _, _ in requests])
    kept = logits.clone()
    for kernels in BACKENDS.values():
        states = [SamplerState(want, prompt, EOS, output, kernels) for want, _, prompt, output in requests]
        for token, (want, row, prompt, output) in zip(sample(logits, states, kernels), requests, strict=True):
            assert token.token_id == plainly(row, want, prompt, output)
            assert token.index == len(output)
            stops = {*want.stop_token_ids, *(() if want.ignore_eos else EOS)}
            assert token.finish == (Finish.STOP if token.token_id in stops else None)
            assert (token.logprob is None) == (want.logprobs is None)
            assert len(token.top) == (want.logprobs or 0)
    assert torch.equal(logits, kept)


@settings(max_examples=50)
@given(SAMPLINGS, st.integers(0, 2**32), st.sampled_from(sorted(BACKENDS)))
def test_a_replay_from_any_point_chooses_the_same(want: Sampling, noise: int, backend: str) -> None:
    """Another backend may have chosen the first part."""
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(noise))
    state, chosen = SamplerState(want, [1, 2], EOS), list[int]()
    for row in logits:
        chosen.append(sample(row[None], [state])[0].token_id)
    kernels = BACKENDS[backend]
    for start in range(12):
        again = SamplerState(want, [1, 2], EOS, chosen[:start], kernels)
        assert [sample(row[None], [again], kernels)[0].token_id for row in logits[start:]] == chosen[start:]


def test_greedy_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    fast = [SamplerState(sampling(temperature=0.0), [], EOS) for _ in range(2)]
    slow = [SamplerState(sampling(temperature=0.0, logit_bias=((0, 0.0),)), [], EOS) for _ in range(2)]
    assert [token.token_id for token in sample(logits, fast)] == [1, 0]
    assert [token.token_id for token in sample(logits, slow)] == [1, 0]


def peaked(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([token]), VOCAB).float()


@every
@pytest.mark.parametrize("temperature", [1.0, 1e-320])
def test_the_hardest_penalty_and_no_token_left_still_give_one(kernels: RowKernels, temperature: float) -> None:
    logits = torch.arange(1.0, VOCAB + 1).unsqueeze(0)
    hard = SamplerState(sampling(temperature=temperature, repetition_penalty=1e-6), [4, 7], EOS, kernels=kernels)
    assert sample(logits, [hard], kernels)[0].token_id in (4, 7)
    barred = sampling(temperature=temperature, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert 0 <= sample(logits, [SamplerState(barred, [4], EOS, kernels=kernels)], kernels)[0].token_id < VOCAB


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


@every
def test_logprobs_are_of_the_raw_distribution(kernels: RowKernels) -> None:
    """The batch also has a row without log-probabilities."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    want = sampling(temperature=0.3, top_k=2, presence_penalty=1.0, logit_bias=((4, 5.0),), logprobs=3)
    states = [SamplerState(one, [], EOS, [1, 2], kernels) for one in (sampling(), want)]
    other, token = sample(logits, states, kernels)
    assert (other.logprob, other.top) == (None, ())
    exact = logits.double().log_softmax(-1)[1]
    assert token.logprob == pytest.approx(exact[token.token_id].item(), abs=1e-9)
    best = exact.topk(3)
    assert [entry.token_id for entry in token.top] == best.indices.tolist()
    assert [entry.logprob for entry in token.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    (only,) = sample(logits[:1], [SamplerState(sampling(logprobs=0), [], EOS, kernels=kernels)], kernels)
    assert only.logprob is not None
    assert only.top == ()


@every
def test_prompt_logprobs(kernels: RowKernels) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    scores = PromptLogprobs()
    scores.extend(kernels.score(logits, [7, 8, 9], [1] * 3))
    exact = logits.double().log_softmax(-1)
    assert scores.own.tolist() == pytest.approx([exact[j, 7 + j].item() for j in range(3)], abs=1e-9)
    assert scores.top_ids.tolist() == exact.argmax(-1).tolist()
    assert scores.top.tolist() == pytest.approx(exact.amax(-1).tolist(), abs=1e-9)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_name_their_row_and_advance_nobody(bad: float, kernels: RowKernels) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = bad
    states = [SamplerState(sampling(), [], EOS, kernels=kernels) for _ in range(3)]
    with pytest.raises(NonFiniteError, match="row 1 are not finite") as caught:
        sample(logits, states, kernels)
    assert caught.value.span == 1
    assert [state.emitted for state in states] == [0, 0, 0]


class Only(Guide):
    """A guide that always allows one token only."""

    def __init__(self, token_id: int) -> None:
        self._bits = np.packbits(np.arange(VOCAB) == token_id, bitorder="little")

    def allowed(self) -> Bits:
        return self._bits

    def accept(self, token_id: int) -> None:
        pass


@every
def test_a_mask_holds_and_a_row_without_any_token_is_named(kernels: RowKernels) -> None:
    """The minimum length yields if the grammar allows only the end."""
    free, tied, ending = (SamplerState(sampling(min_tokens=9), [], EOS, kernels=kernels) for _ in range(3))
    tied.guide, ending.guide = Only(9), Only(EOS[0])
    states, logits = [free, tied, ending], torch.zeros(3, VOCAB)
    for _ in range(5):
        assert [token.token_id for token in sample(logits, states, kernels)][1:] == [9, EOS[0]]
    logits[1, 9] = -math.inf
    with pytest.raises(NonFiniteError, match="row 1 allow no token") as caught:
        sample(logits, states, kernels)
    assert caught.value.span == 1
    assert [state.emitted for state in states] == [5, 5, 5]
