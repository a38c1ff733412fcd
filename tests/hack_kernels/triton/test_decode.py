"""Decode kernels under Triton's interpreter equal the reference for every format, batch and division of work."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hack_kernels.hack_format import HEAD_DIMS, PAGE_TOKENS, Arithmetic, HackFormat
from hack_kernels.triton.code_tiles import CODE_BITS
from torch import Tensor

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch

pytest.importorskip("triton")

from hack_kernels.triton.decode import attn_decode, decode_launch
from hack_kernels.triton.paged import rows_of_heads
from hack_kernels.triton.split import Workspace

CPU = torch.device("cpu")
FORMATS = [HackFormat(d, pi, arithmetic=a) for d, pi, a in itertools.product(HEAD_DIMS, PAGE_TOKENS, Arithmetic)]


def run(batch: DecodeBatch, programs: int) -> Tensor:
    workspace = Workspace(CPU, programs)
    workspace.partials(8, 8, 256, 16).fill_(float("nan"))
    out = attn_decode(batch.fmt, batch.pool, batch.spans, batch.q, workspace)
    assert int(workspace.tickets(1, 1).count_nonzero()) == 0, "tickets must be 0 again for the next launch"
    return out


def assert_equal(found: Tensor, expected: Tensor, bound: float = 2e-6) -> None:
    """Assert that rows are equal within bounds. A weight of P near a tie may move a row by one step."""
    errors = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert float(errors.median()) < bound
    assert float(errors.max()) < max(bound, 1 / 127)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_format_equals_the_reference(fmt: HackFormat) -> None:
    batch = decode_batch(fmt, [3 * fmt.page_tokens + 1], heads=1, group=3)
    assert_equal(run(batch, programs=1), batch.expected())


@pytest.mark.parametrize("bits", list(itertools.product(CODE_BITS, CODE_BITS)))
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("stored_sums", [True, False])
def test_every_width_of_codes(bits: tuple[int, int], page_tokens: int, stored_sums: bool) -> None:
    form = Arithmetic.ASYMMETRIC if not stored_sums else Arithmetic.SYMMETRIC
    fmt = HackFormat(96, page_tokens, *bits, arithmetic=form, stored_sums=stored_sums)
    batch = decode_batch(fmt, [page_tokens], heads=1, group=2)
    assert_equal(run(batch, programs=1), batch.expected())


@pytest.mark.parametrize("group", [1, 3, 7, 8, 24])
def test_ragged_batches_for_any_group(group: int) -> None:
    """Lengths are around a page and very different. One open page has one row."""
    batch = decode_batch(HackFormat(64, 32), [31, 0, 32, 300, 33], heads=2 if group == 3 else 1, group=group)
    assert_equal(run(batch, programs=6), batch.expected())


def test_results_do_not_depend_on_how_work_is_divided() -> None:
    batch = decode_batch(HackFormat(64, 32), [500, 5, 37], heads=1, group=1)
    outs = [run(batch, programs) for programs in (1, 5, 21, 60)]
    for out in outs[1:]:
        assert_equal(out, outs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_and_outputs_have_the_models_type(dtype: torch.dtype) -> None:
    batch = decode_batch(HackFormat(64, 64), [70], heads=1, group=2, dtype=dtype)
    out = run(batch, programs=1)
    assert out.dtype is dtype
    assert_equal(out, batch.expected(), torch.finfo(dtype).eps)


def test_some_heads_of_a_pool() -> None:
    """A tensor-parallel worker may hold a view of its KV heads."""
    batch = decode_batch(HackFormat(64, 32), [100], heads=4, group=2)
    part = DecodeBatch(
        batch.fmt,
        {name: plane[:, 1:3] for name, plane in batch.wire.items()},
        {name: plane[:, 1:3] for name, plane in batch.pages.items()},
        batch.k,
        batch.v,
        batch.open_k[:, 1:3],
        batch.open_v[:, 1:3],
        batch.spans,
        batch.q[:, 2:6].contiguous(),
    )
    assert_equal(run(part, programs=2), part.expected())


def test_queries_beside_keys_and_values_are_read_where_they_are() -> None:
    """A model's product makes rows of queries, keys and values. Decode copies nothing out of these rows."""
    batch = decode_batch(HackFormat(64, 32), [40, 3], heads=2, group=2)
    packed = torch.cat((batch.q, torch.full((2, 4, 64), float("nan"))), 1)
    beside = packed[:, :4]
    assert rows_of_heads(beside) is beside
    assert torch.equal(run(replace(batch, q=beside), programs=2), run(batch, programs=2))
    assert rows_of_heads(batch.q[..., ::2]).is_contiguous()


@pytest.mark.parametrize(("arithmetic", "per_processor"), [(Arithmetic.SYMMETRIC, 3), (Arithmetic.ASYMMETRIC, 2)])
def test_as_many_programs_as_registers_let_run_at_once(arithmetic: Arithmetic, per_processor: int) -> None:
    fmt = HackFormat(128, 64, arithmetic=arithmetic)
    batch = decode_batch(fmt, [70], heads=1, group=2)
    launch = decode_launch(fmt, batch.pool, batch.spans, batch.q, batch.q, Workspace(CPU, 3 * 132))
    assert launch.grid == (1, per_processor * 132)


def test_attention_on_one_key_and_on_all_alike() -> None:
    """One score is far above the rest; or attention is long and flat, where a fixed scale of P would lose every
    weight."""
    batch = decode_batch(HackFormat(64, 32), [320], heads=1, group=2)
    for factor in (0.0, 60.0):
        batch.q.mul_(factor) if factor else batch.q.zero_()
        assert_equal(run(batch, programs=3), batch.expected())
        batch.q.normal_(generator=torch.Generator().manual_seed(1))
