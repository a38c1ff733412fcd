"""Rotations of heads in C++, on every instruction set, and in Triton agree with their torch form."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import RowKernels
from hack_kernels.head_rotations import HeadRotations

from tests.hack_kernels.test_rowwise import DTYPES, ISAS, TORCH, rows


@pytest.fixture(params=[*ISAS, "triton"])
def rotating(request: pytest.FixtureRequest) -> RowKernels:
    """The row kernels of each backend with its own rotation of heads."""
    if request.param == "triton":
        found: RowKernels = pytest.importorskip("hack_kernels.triton.backend").TritonBackend(torch.device("cpu")).rows
        return found
    return cpu.CpuBackend(request.param, threads=2).rows


@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (1, 6), (3, 3), (2, 14)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_rotate_heads(rotating: RowKernels, dim: int, groups: int, heads: int) -> None:
    """None, one or several rows are slices of wider ones. Results agree within the rounding of a sum in FP32."""
    matrices, shift = rows(20, groups, dim, dim), rows(21, groups, dim)
    for count in (0, 1, 3, 40):
        x = rows(22, count, heads + 2, dim)[:, 1:-1]
        of_head = matrices.double().repeat_interleave(heads // groups, 0)
        rotated = torch.einsum("hij,thj->thi", of_head, x.double())
        size = torch.einsum("hij,thj->thi", of_head.abs(), x.double().abs())
        for b in (None, shift):
            added = torch.zeros(1) if b is None else b.double().repeat_interleave(heads // groups, 0)
            for each in (rotating, TORCH):
                found = each.rotate_heads(x, matrices, b)
                assert (found.dtype, found.shape, found.is_contiguous()) == (torch.float32, x.shape, True)
                assert bool(((found.double() - rotated - added).abs() <= 1e-6 * (size + added.abs())).all())
                laid_out = each.lay_out(matrices)
                assert torch.equal(laid_out, matrices)
                assert torch.equal(each.rotate_heads(x, laid_out, b), found)


def test_a_rotated_row_does_not_depend_on_its_place(rotating: RowKernels) -> None:
    """There are enough rows for several threads, and they are slices of wider ones.

    Triton's interpreter uses numpy's BLAS for a dot, whose order of sums depends on a row's place in the tile on some
    CPUs. Integers have one sum in any order, so they are used there. On a GPU `bench.gpu` checks other numbers.
    """
    wide, matrices, shift = rows(23, 300, 9, 64), rows(24, 2, 64, 64), rows(25, 2, 64)
    if rotating.__class__.__module__.startswith("hack_kernels.triton"):
        wide, matrices, shift = wide.round(), matrices.round(), shift.round()
    x = wide[:, 2:8]
    for each in (rotating, TORCH):
        whole = each.rotate_heads(x, matrices, shift)
        for start, size in [(0, 1), (3, 1), (299, 1), (5, 2), (8, 3), (2, 7), (0, 64), (7, 129)]:
            part = slice(start, start + size)
            assert torch.equal(each.rotate_heads(x[part], matrices, shift), whole[part])
            assert torch.equal(each.rotate_heads(x[part].contiguous(), matrices, shift), whole[part])


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80])
def test_rotate_rows_is_a_rotation_of_each(rotating: RowKernels, dim: int, dtype: torch.dtype) -> None:
    """Results are bit-equal for no row, one row, and rows for several threads. Heads are slices of wider rows."""
    query, key, value = (rows(26 + nth, groups, dim, dim) for nth, groups in enumerate((3, 3, 1)))
    shift = rows(29, 3, dim)
    for count in (0, 1, 3, 70):
        q, k, v = rows(30, count, 15, dim, dtype=dtype).split_with_sizes((9, 3, 3), dim=1)
        narrow_k, narrow_v = (x.half().float() for x in (k, v))
        for each in (rotating, TORCH):
            rotated = (each.rotate_heads(q.float(), query), each.rotate_heads(narrow_k, key, shift))
            for rotations, v_rotated in (
                (HeadRotations(query, key, shift), narrow_v),
                (HeadRotations(query, key, shift, value, value), each.rotate_heads(narrow_v, value)),
            ):
                for found, wanted in zip(each.rotate_rows(q, k, v, rotations), (*rotated, v_rotated), strict=True):
                    assert found.is_contiguous()
                    assert torch.equal(found, wanted)
            back = rotated[0]
            assert torch.equal(each.rotate_heads(back, value, dtype=dtype), each.rotate_heads(back, value).to(dtype))


def test_a_rotation_of_rows_that_fp16_does_not_hold_is_not_finite(rotating: RowKernels) -> None:
    """The kernel that writes the rows then detects it. This holds with and without a second matrix."""
    mean = torch.full((1, 64, 64), 1 / 64)
    x = torch.ones(2, 3, 64)
    x[1, 2, 5] = 7e4
    for rotations in (HeadRotations(mean, mean), HeadRotations(mean, mean, None, mean, mean)):
        q, k, v = rotating.rotate_rows(x, x, x, rotations)
        assert bool(torch.isfinite(q).all())
        for found in (k, v):
            assert torch.isfinite(found).all(-1).tolist() == [[True, True, True], [True, True, False]]


def test_placed_rotations_are_the_same(rotating: RowKernels) -> None:
    """In another order in memory, perhaps; of some heads, too. A shift has one order."""
    square, shift = rows(40, 3, 64, 64), rows(41, 3, 64)
    q, k = rows(42, 5, 6, 64), rows(43, 5, 3, 64)
    rotations = HeadRotations(square, square, shift, square, square)
    placed = rotations.placed(torch.device("cpu"), rotating.lay_out)
    assert placed.shift is not None
    assert placed.shift.is_contiguous()
    for found, wanted in zip(
        rotating.rotate_rows(q, k, k, placed), rotating.rotate_rows(q, k, k, rotations), strict=True
    ):
        assert torch.equal(found, wanted)
    some, part = placed.heads(1, 2), rotations.heads(1, 2)
    of_some = rotating.rotate_rows(q[:, 2:], k[:, 1:], k[:, 1:], some)
    for found, wanted in zip(of_some, rotating.rotate_rows(q[:, 2:], k[:, 1:], k[:, 1:], part), strict=True):
        assert torch.equal(found, wanted)


def test_rotations_of_some_heads() -> None:
    """A matrix for all heads stays the same. `value` may be one for all heads even if `key` is not."""
    rotations = HeadRotations(
        rows(31, 4, 2, 2), rows(32, 4, 2, 2), rows(33, 4, 2), rows(34, 1, 2, 2), rows(35, 1, 2, 2)
    )
    assert rotations.heads(0, 4) is rotations
    part = rotations.heads(1, 2)
    for found, whole in ((part.query, rotations.query), (part.key, rotations.key), (part.shift, rotations.shift)):
        assert found is not None
        assert whole is not None
        assert torch.equal(found, whole[1:3])
    assert part.value is rotations.value
    same = HeadRotations(rows(36, 1, 2, 2), rows(37, 1, 2, 2))
    assert same.heads(3, 1) is same
    values = HeadRotations(same.query, same.key, None, rows(38, 4, 2, 2), rows(39, 4, 2, 2))
    some = values.heads(2, 2)
    assert some.key is same.key
    for of_some, of_all in ((some.value, values.value), (some.out, values.out)):
        assert of_some is not None
        assert of_all is not None
        assert torch.equal(of_some, of_all[2:])


@pytest.mark.parametrize("isa", ISAS)
def test_what_does_not_fit_is_refused_by_name(isa: str) -> None:
    kernels, x = cpu.CpuBackend(isa, threads=2).rows, rows(14, 4, 2, 16)
    eye, two = torch.eye(16)[None], torch.eye(16).repeat(3, 1, 1)
    for rotated, matrices, shift, dtype, name in (
        (x, eye[..., :8], None, torch.float32, "matrices"),
        (x, eye.half(), None, torch.float32, "matrices has"),
        (x, two, None, torch.float32, "matrices do not divide"),
        (x, eye, rows(14, 1, 8), torch.float32, "shift"),
        (x, eye, rows(14, 1, 16), torch.float16, "out must be float32"),
        (x.long(), eye, None, torch.float32, "x "),
    ):
        with pytest.raises(ValueError, match=rf"^{name}"):
            kernels.rotate_heads(rotated, matrices, shift, dtype)
