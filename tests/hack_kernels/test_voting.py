"""Votes of queries in C++, on every instruction set, against the definition: close to it, and the same however a prompt
is cut and threads divide it."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable
from hack_kernels.cpu.extension import compiled, supported_isas
from hack_kernels.voting import VOTE_BITS, VoteKernels, Voting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

KV_HEADS = 2
every_isa = pytest.mark.parametrize("isa", ISAS)


def kernels(isa: str, threads: int = 2) -> VoteKernels:
    return cpu.CpuBackend(isa, threads=threads).rows


def rows(seed: int, total: int, voters: int, group: int = 3, dim: int = 64) -> tuple[Tensor, Tensor]:
    """Queries [voters, Hq, D] bfloat16 and keys [Hkv, total, D] float16, which they tell apart."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(voters, KV_HEADS * group, dim, generator=draw).bfloat16()
    return q, (2 * torch.randn(KV_HEADS, total, dim, generator=draw)).half()


@every_isa
@pytest.mark.parametrize(("total", "voters", "group", "dim"), [(1, 1, 1, 64), (70, 70, 3, 64), (300, 33, 4, 80)])
def test_votes_are_close_to_the_definition(isa: str, total: int, voters: int, group: int, dim: int) -> None:
    q, keys = rows(1, total, voters, group, dim)
    found, exact = kernels(isa).votes(q, keys, total - voters), Voting().votes(q, keys, total - voters)
    assert found.dtype is torch.int64
    assert torch.allclose(found / 2.0**VOTE_BITS, exact / 2.0**VOTE_BITS, rtol=1e-5, atol=1e-6 * voters * group)


@every_isa
@settings(max_examples=20)
@given(total=st.integers(1, 150), cut=st.integers(0, 150), threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_neither_cuts_nor_threads_change_a_vote(isa: str, total: int, cut: int, threads: int, seed: int) -> None:
    q, keys = rows(seed, total, total)
    cut = min(cut, total)
    whole, parts = kernels(isa).votes(q, keys, 0), torch.zeros(KV_HEADS, total, dtype=torch.int64)
    for begin, end in ((0, cut), (cut, total)):
        if begin < end:
            parts[:, :end] += kernels(isa, threads).votes(q[begin:end], keys[:, :end], begin)
    assert torch.equal(parts, whole)


@every_isa
def test_a_key_that_outshines_all_gets_every_vote(isa: str) -> None:
    """Its score is above the others' by more than powers of two in FP32 hold."""
    q, keys = rows(3, 100, 20)
    keys.clamp_(-1, 1)[:, 7] = 60000.0
    votes = kernels(isa).votes(q.abs(), keys, 80)
    assert bool((votes[:, 7] == 3 * 20 << VOTE_BITS).all())
    assert int(votes.sum()) == KV_HEADS * 3 * 20 << VOTE_BITS


@every_isa
def test_bad_arguments_are_refused_by_name(isa: str) -> None:
    native = compiled().kernels(isa, 1)
    q, keys, votes = torch.zeros(2, 6, 64), torch.zeros(2, 5, 64), torch.zeros(1, 2, 5, dtype=torch.int64)
    for given_q, given_keys, first, group, given_votes, reason in (
        (q, keys, 0, 4, votes, "multiple of group"),
        (q, keys, -1, 3, votes, "first is negative"),
        (q, keys, 4, 3, votes, "past the last key"),
        (q, keys[:, :, :32].contiguous(), 0, 3, votes, "keys"),
        (q, keys.half(), 0, 3, votes, "keys"),
        (q, keys, 0, 3, votes[:, :, :4].contiguous(), "votes"),
    ):
        with pytest.raises(ValueError, match=reason):
            native.count_votes(given_q, given_keys, first, group, given_votes)
