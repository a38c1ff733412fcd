"""The definition of a choice agrees with plain arithmetic. C++ and torch on a device always choose the definition's
id."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable, RowKernels
from hack_kernels.choosing import (
    FAULTY,
    LOWEST,
    MOST_IDS,
    NONE_ALLOWED,
    NOT_FINITE,
    WEIGHT_BITS,
    ChoiceInput,
    ChoiceRules,
    Chooser,
    drawn,
    exponential,
    uniform,
    unpacked,
)
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.device_choosing import DeviceRows
from hack_kernels.rowwise import Rowwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

NUMPY = Rowwise()
COMPILED = {isa: cpu.CpuBackend(isa, threads=2).rows for isa in ISAS}
OTHERS = {**COMPILED, "device": DeviceRows()}
EVERY = {"numpy": NUMPY, **OTHERS}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 2, 31, 32, 33, 64, 100, 1000]

every = pytest.mark.parametrize("kernels", EVERY.values(), ids=EVERY.keys())


@st.composite
def rules(draw_from: st.DrawFn) -> ChoiceRules:
    ids = st.integers(0, 120)
    return ChoiceRules(
        seed=draw_from(st.integers(0, 2**64 - 1)),
        temperature=draw_from(st.sampled_from([0.0, 1e-310, 1e-3, 0.7, 1.0, 3.0, 1e300])),
        top_p=draw_from(st.sampled_from([1.0, 0.9, 0.5, 0.01, 0.0])),
        top_k=draw_from(st.sampled_from([0, 1, 3, 40, 5000])),
        min_p=draw_from(st.sampled_from([0.0, 0.1, 1.0])),
        presence=draw_from(st.sampled_from([0.0, -2.0, 1.5])),
        frequency=draw_from(st.sampled_from([0.0, 0.5])),
        repetition=draw_from(st.sampled_from([1.0, 0.8, 1.3])),
        bias=tuple(draw_from(st.lists(st.tuples(ids, st.sampled_from([-100.0, 0.1, 2.0])), max_size=3))),
        barred=tuple(draw_from(st.lists(ids, max_size=3))),
        barred_until=draw_from(st.sampled_from([0, 3])),
    )


@st.composite
def batches(draw_from: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Logits [B, n] of any dtype and spread, some with many ties or -inf, and masks, some of which allow no id."""
    batch, size = draw_from(st.integers(1, 5)), draw_from(st.sampled_from(SIZES))
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 2**32)))
    x = draw_from(st.sampled_from([0.01, 1.0, 6.0, 60.0])) * torch.randn(batch, size + 3, generator=generator)
    x = draw_from(st.sampled_from([x, x.round(), x.masked_fill(x < 0, -torch.inf)]))
    x = x.to(draw_from(st.sampled_from(DTYPES)))[:, 3:]  # rows lie apart
    words = (size + 31) // 32
    mask = torch.randint(-(2**31), 2**31, (batch, words), dtype=torch.int64, generator=generator).int()
    mask[0] = draw_from(st.sampled_from([-1, 0, 1]))
    return x, draw_from(st.sampled_from([None, mask]))


def choosers(
    kernels: RowKernels, each: Sequence[ChoiceRules], prompt: Sequence[int], output: Sequence[int]
) -> list[Chooser]:
    made = [kernels.new_chooser(one, prompt) for one in each]
    for chooser in made:
        for token_id in output:
            chooser.append(token_id)
    return made


def chosen(
    kernels: RowKernels,
    x: Tensor,
    each: Sequence[ChoiceRules],
    allowed: Tensor | None = None,
    faulty: Tensor | None = None,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[int]:
    return kernels.choose(ChoiceInput(x, choosers(kernels, each, prompt, output), faulty, allowed))


@settings(max_examples=400)
@given(st.data())
def test_every_instruction_set_and_device_chooses_as_defined(data: st.DataObject) -> None:
    x, allowed = data.draw(batches())
    each = data.draw(st.lists(rules(), min_size=len(x), max_size=len(x)))
    ids = st.lists(st.integers(0, 120), max_size=6)
    prompt, output = data.draw(ids), data.draw(ids)
    expected = chosen(NUMPY, x, each, allowed, prompt=prompt, output=output)
    for kernels in OTHERS.values():
        assert chosen(kernels, x, each, allowed, prompt=prompt, output=output) == expected


@pytest.mark.parametrize("size", [4096, 50_001])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 30.0])
def test_large_vocabularies(size: int, spread: float) -> None:
    """Distributions are flat, with most ids as candidates, or peaked, and are cut in every way."""
    x = spread * torch.randn(8, size, generator=torch.Generator().manual_seed(1))
    cuts = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 3000, "top_p": 0.99}, {"min_p": 0.05}, {"top_p": 0.999999}]
    for index, cut in enumerate(cuts):
        each = [ChoiceRules(seed=row + 8 * index, temperature=0.8, **cut) for row in range(8)]  # type: ignore[arg-type]
        expected = chosen(NUMPY, x, each)
        assert all(chosen(kernels, x, each) == expected for kernels in OTHERS.values())


@every
def test_equal_logits_are_drawn_evenly_and_in_order(kernels: RowKernels) -> None:
    """With 2^16 equal logits, the id equals the first 16 bits of the uniform number."""
    x, seeds = torch.zeros(1, 2**16), (0, 7, 2**64 - 1, 2**63)
    for seed in seeds:
        output: list[int] = []
        for index in range(5):
            expected = math.floor(2**16 * uniform(seed, index))
            assert chosen(kernels, x, [ChoiceRules(seed=seed, temperature=1.0)], output=output) == [expected]
            output.append(expected)


def test_uniform_numbers_are_pinned() -> None:
    """Nodes of different builds must draw the same numbers. A change breaks replays during a rolling upgrade."""
    pinned = [0.011546754286331562, 0.5023796042735054, 0.8720734548204873, 0.23494158814525556]
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 0), uniform(2**64 - 1, 0)] == pinned
    assert len({uniform(5, index) for index in range(1000)}) == 1000


def test_the_exponential_is_close_and_rounds_to_nothing_at_its_end() -> None:
    x = np.concatenate((np.linspace(-30, 0, 100_001), -np.geomspace(1e-18, 1, 1000), [0.0, -math.inf]))
    found, exact = exponential(x, 0), np.exp(x)
    assert (np.abs(found - exact) <= 4e-16 * exact + math.exp(LOWEST)).all()
    assert exponential(np.zeros(1), 0) == 1
    assert exponential(np.array([-32.0]), WEIGHT_BITS) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"temperature": 2.0}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.2}])
def test_frequencies_follow_the_distribution(cut: dict[str, float]) -> None:
    """Chi-squared over 8,000 draws; the bound is 6 standard deviations of that statistic above its mean."""
    want = ChoiceRules(**{"seed": 1, "temperature": 1.0, **cut})  # type: ignore[arg-type]
    row, draws = np.linspace(3, -1, 10), 8_000
    counts = np.bincount([drawn(row, want, uniform(1, index)) for index in range(draws)], minlength=10)
    weights = np.exp(row / want.temperature)
    order = want.top_k or 10
    if want.min_p:
        order = int((weights >= want.min_p * weights[0]).sum())
    mass = np.cumsum(weights[:order]) / weights[:order].sum()
    order = int((mass < want.top_p - 1e-12).sum()) + 1 if want.top_p < 1 else order
    expected = weights[:order] / weights[:order].sum() * draws
    assert counts[order:].sum() == 0
    freedom = order - 1
    assert ((counts[:order] - expected) ** 2 / expected).sum() < freedom + 6 * math.sqrt(2 * freedom)


@every
def test_masked_ids_are_never_chosen(kernels: RowKernels) -> None:
    """This holds for greedy and drawn choices and any bias. A row of -1 masks nothing."""
    x = torch.linspace(0, 1, 70).expand(3, 70)
    allowed = torch.tensor([[-1, -1, -1], [0, 1 << 5, 0], [1 << 31, 0, 1]], dtype=torch.int64).int()
    assert unpacked(allowed, 70)[2].nonzero()[0].tolist() == [31, 64]
    for temperature in (0.0, 5.0):
        found = set[tuple[int, ...]]()
        for seed in range(60):
            rule = ChoiceRules(seed=seed, temperature=temperature, bias=((69, 500.0), (31, 1.0)))
            found.add(tuple(chosen(kernels, x, [rule] * 3, allowed)))
        assert {row[1] for row in found} == {37}
        assert {row[2] for row in found} == ({31} if temperature == 0 else {31, 64})
        assert {row[0] for row in found} == {69}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [*SIZES, 172, 768, 4096])
@every
def test_greedy_takes_the_first_of_the_largest(kernels: RowKernels, n: int, dtype: torch.dtype) -> None:
    """This also holds among equals, of which coarse values have many, and if every value is negative. A bias of 0 takes
    another code path."""
    generator = torch.Generator().manual_seed(n)
    x = torch.cat([3 * torch.randn(5, n + 3, generator=generator) for _ in range(3)])
    x[5:10], x[10:] = x[5:10].round(), -x[10:].abs()
    x = x.to(dtype)[:, 3:]
    x[0], x[1, n // 2 + 1 :] = -torch.inf, -torch.inf
    x[2], x[2, n // 3] = -0.0, 0.0
    expected = [NOT_FINITE, *x[1:].float().numpy().argmax(axis=1).tolist()]
    for bias in ((), ((0, 0.0),)):
        assert chosen(kernels, x, [ChoiceRules(seed=0, temperature=0.0, bias=bias)] * 15) == expected
    assert expected[2] == 0


@every
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_is_reported(kernels: RowKernels, broken: float, temperature: float) -> None:
    """The report comes before any rule, so that no mask hides it, and takes precedence over `NONE_ALLOWED`."""
    rule = ChoiceRules(seed=0, temperature=temperature, top_k=1)
    for at in (0, 15, 16, 38):
        x = torch.randn(4, 39, generator=torch.Generator().manual_seed(at))
        x[1, at] = broken
        allowed = torch.full((4, 2), -1, dtype=torch.int32)
        allowed[1], allowed[2] = torch.tensor([6, 0]), 0
        expected = [int(x[0].argmax()), NOT_FINITE, NONE_ALLOWED, int(x[3].argmax())]
        assert chosen(kernels, x, [rule] * 4, allowed) == expected
        faulty = torch.tensor([False, True, True, False])
        assert chosen(kernels, x, [rule] * 4, allowed, faulty) == [expected[0], FAULTY, FAULTY, expected[3]]


@every
def test_bars_give_way_where_they_leave_no_id(kernels: RowKernels) -> None:
    """The barred ids are the whole vocabulary, or all that a mask allows."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    whole = ChoiceRules(seed=0, temperature=0.0, barred=(0, 1, 2), barred_until=1)
    part = ChoiceRules(seed=0, temperature=0.0, barred=(0, 1), barred_until=1, bias=((0, 5.0),))
    assert chosen(kernels, logits, [whole]) == [1]
    assert chosen(kernels, logits, [part]) == [2]
    assert chosen(kernels, logits, [part], allowed=torch.tensor([[0b011]], dtype=torch.int32)) == [0]
    assert chosen(kernels, logits, [part], allowed=torch.zeros(1, 1, dtype=torch.int32)) == [NONE_ALLOWED]


@pytest.mark.parametrize("isa", ISAS)
def test_a_choice_depends_on_its_row_alone(isa: str) -> None:
    """This holds in any batch, with any number of threads. A call changes no chooser."""
    x = 2 * torch.randn(64, 4097, generator=torch.Generator().manual_seed(3))
    each = [
        ChoiceRules(seed=row, temperature=0.9, top_p=0.95, repetition=1.1, top_k=(0, 40)[row % 2]) for row in range(64)
    ]
    found = {}
    for threads in (1, 3):
        kernels = cpu.CpuBackend(isa, threads).rows
        made = choosers(kernels, each, [5, 6], [7])
        found[threads] = kernels.choose(ChoiceInput(x, made))
        assert kernels.choose(ChoiceInput(x, made)) == found[threads]
        alone = [ChoiceInput(x[row : row + 1], made[row : row + 1]) for row in range(64)]
        assert [kernels.choose(one)[0] for one in alone] == found[threads]
    assert found[1] == found[3]


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_of_the_raw_distribution(kernels: RowKernels, dtype: torch.dtype) -> None:
    """Of equal logits the first ones count. If fewer exist than are asked for, all are given."""
    for size in (1, 5, 100, 5000):
        x = (3 * torch.randn(4, size, generator=torch.Generator().manual_seed(size))).round(decimals=1).to(dtype)
        exact = x.double().log_softmax(-1)
        ids, tops = [0, size - 1, size // 2, 0], [0, 1, 7, 40]
        for row, (of_id, best) in enumerate(kernels.score(x, ids, tops)):
            assert of_id == pytest.approx(exact[row, ids[row]].item(), abs=1e-9)
            order = (-x[row].double()).argsort(stable=True)[: tops[row]]
            assert [token_id for token_id, _ in best] == order.tolist()
            assert [value for _, value in best] == pytest.approx(exact[row, order].tolist(), abs=1e-9)


@every
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_score(kernels: RowKernels, broken: float) -> None:
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    x[1, 7] = broken
    whole = kernels.score(x, [1, 2, 3], [4, 4, 4])
    assert math.isnan(whole[1][0])
    assert [len(best) for _, best in whole] == [4, 0, 4]
    assert whole[0] == kernels.score(x[:1], [1], [4])[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": -0.1},
        {"top_k": -1},
        {"min_p": 1.1},
        {"presence": math.inf},
        {"presence": -1e31},
        {"frequency": 1e31},
        {"repetition": 1e-7},
        {"repetition": 1e7},
        {"bias": ((1, -1e31),)},
        {"frequency": math.nan},
        {"repetition": 0.0},
        {"bias": ((1, math.inf),)},
        {"bias": ((-1, 1.0),)},
        {"barred": (-1,)},
    ],
)
def test_rules_that_no_choice_can_follow_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}"):
        ChoiceRules(**{"seed": 0, "temperature": 1.0, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
def test_wrong_inputs_are_named(isa: str) -> None:
    kernels, x = COMPILED[isa], torch.zeros(2, 40)
    made = [kernels.new_chooser(ChoiceRules(seed=0, temperature=1.0), []) for _ in range(2)]
    good, flags = torch.full((2, 2), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
    assert kernels.choose(ChoiceInput(x, made, flags, good)) == kernels.choose(ChoiceInput(x, made))
    for allowed in (good[:, :1], good[:1], good.long(), good.T[::2]):
        with pytest.raises(ValueError, match=r"^allowed"):
            kernels.choose(ChoiceInput(x, made, flags, allowed))
    for faulty in (flags[:1], flags.int()):
        with pytest.raises(ValueError, match=r"^faulty"):
            kernels.choose(ChoiceInput(x, made, faulty, good))
    for given_choosers in (made[:1], [made[0], NUMPY.new_chooser(ChoiceRules(seed=0, temperature=1.0), [])]):
        with pytest.raises(ValueError, match=r"^choosers"):
            kernels.choose(ChoiceInput(x, given_choosers))
    for logits in (x.long(), x[0], x.T):
        with pytest.raises(ValueError, match=r"^logits"):
            kernels.choose(ChoiceInput(logits, made))
    with pytest.raises(ValueError, match=r"^token_id"):
        made[0].append(-1)
    with pytest.raises(ValueError, match=r"^prompt_ids"):
        kernels.new_chooser(ChoiceRules(seed=0, temperature=1.0), [-1])
    for ids, tops, name in (([0], [0, 0], "ids and tops"), ([0, 40], [0, 0], "ids"), ([0, 0], [0, -1], "tops")):
        with pytest.raises(ValueError, match=f"^{name}"):
            kernels.score(x, ids, tops)


@every
def test_a_vocabulary_whose_weights_could_overflow_is_refused(kernels: RowKernels) -> None:
    x = torch.zeros(1, 1).expand(1, MOST_IDS + 1).contiguous()
    with pytest.raises(ValueError, match="at most"):
        chosen(kernels, x, [ChoiceRules(seed=0, temperature=1.0)])
