"""Pages whose values are read one by one, in C++ on every instruction set: the definition's bytes, FP64's attention."""

from __future__ import annotations

import math

import pytest
import torch
from hack_kernels import cpu, load
from hack_kernels.base import Rows
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.pools import new_pool
from hack_kernels.read_format import ReadFormat
from torch import Tensor

from tests.hack_kernels.cpu.cases import relative
from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.reading import FORMATS, assert_same_bytes, definition, filled, kernels_of, one_span, unfused

HEADS = 2
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def some_rows(fmt: ReadFormat, n: int) -> tuple[Tensor, Tensor]:
    """K and V [n, Hkv, D] with a few large channels."""
    k, v = (random_rows(seed, n, HEADS, fmt.head_dim) for seed in (1, 2))
    k[..., 3:5] *= 20
    return k.half(), v.half()


@every_format
def test_bytes_equal_the_definition(backend: cpu.CpuBackend, fmt: ReadFormat) -> None:
    ours = kernels_of(backend, fmt)
    assert ours.served_by == "cpu"
    assert_same_bytes(ours, fmt, HEADS)


def fp64_attention(fmt: ReadFormat, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """FP64 attention of one query [D] at `position` over head 0: earlier pages dequantized, its own page exact."""
    pi, kernels = fmt.page_tokens, definition(fmt)
    own, seen = position // pi * pi, []
    planes = kernels.export(filled(kernels, fmt, k, v), torch.arange(own // pi))
    for name, x in (("k", k[:, 0]), ("v", v[:, 0])):
        mine = {plane: x.transpose(0, 1) for plane, x in planes.items() if plane.split("_")[0] == name}
        sealed = kernels.dequantize(name, mine)[:, 0].flatten(0, 1)
        sealed = sealed if fmt.fused else sealed.half().float()
        seen.append(torch.cat((sealed, x[own : position + 1].float())).double())
    weights = torch.softmax(seen[0] @ q.double() / math.sqrt(fmt.head_dim), 0)
    return weights @ seen[1]


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("group", [1, 3, 7])
@every_format
def test_attention_equals_fp64_on_the_dequantized_pages(backend: cpu.CpuBackend, fmt: ReadFormat, group: int) -> None:
    """Prompts that begin inside pages, decode with few rows and with many, fused and unfused, to 1e-5 relative."""
    pi = fmt.page_tokens
    n = 3 * pi + 5
    k, v = some_rows(fmt, n)
    q = random_rows(3, n, HEADS * group, fmt.head_dim)
    for each in (fmt, unfused(fmt)):
        kernels = kernels_of(backend, each)
        pool = filled(kernels, each, k, v)
        whole = kernels.attend(0, pool, one_span(0, n, 3), Rows(q, k, v))
        decoded = kernels.attend(0, pool, one_span(n - 1, 1, 3), Rows(q[-1:]))
        tail = kernels.attend(0, pool, one_span(n - 3, 3, 3), Rows(q[-3:], k[-3:], v[-3:]))
        for position in (0, pi - 1, pi, n - 1):
            assert relative(whole[position, 0], fp64_attention(each, q[position, 0], k, v, position)) < 1e-5
        assert relative(decoded[0], whole[-1]) < 1e-5
        assert relative(tail, whole[-3:]) < 1e-5


@every_format
def test_attention_to_few_rows_agrees_with_that_to_many(backend: cpu.CpuBackend, fmt: ReadFormat) -> None:
    """A sequence that is long enough to be split, in pages out of order, with a list of pages for each head."""
    pi, pages = fmt.page_tokens, 9
    k, v = some_rows(fmt, pages * pi)
    ours, theirs = kernels_of(backend, fmt), definition(fmt)
    q = random_rows(3, 1, HEADS * 4, fmt.head_dim)
    outs = []
    for kernels in (ours, theirs):
        pool, spans = filled(kernels, fmt, k, v), one_span(pages * pi, 1, pages)
        pool.open_k[0, :, 0], pool.open_v[0, :, 0] = 1.0, -1.0
        lists = torch.stack((torch.arange(pages).flip(0), torch.arange(pages)))
        by_head = type(spans)(spans.starts, spans.counts, spans.offsets, lists[None], spans.slots)
        outs += [kernels.attend(0, pool, each, Rows(q)) for each in (spans, by_head)]
    assert relative(outs[0], outs[2]) < 1e-5
    assert relative(outs[1], outs[3]) < 1e-5


@every_format
def test_unfused_attention_is_timed_apart(backend: cpu.CpuBackend, fmt: ReadFormat) -> None:
    k, v = some_rows(fmt, 2 * fmt.page_tokens)
    for each in (fmt, unfused(fmt)):
        kernels = kernels_of(backend, each)
        kernels.attend(0, filled(kernels, each, k, v), one_span(2 * fmt.page_tokens - 1, 1, 2), Rows(k[-1:].float()))
        assert (kernels.approximation_s > 0) == (not each.fused)


@pytest.mark.parametrize(
    "fmt",
    [FloatFormat(64, page_tokens=24), FloatFormat(80), GroupFormat(64, Grouping(4, 8, True), Grouping(4, 32))],
    ids=str,
)
def test_shapes_without_a_kernel_go_to_the_definition(fmt: ReadFormat) -> None:
    kernels = kernels_of(load("cpu"), fmt)
    assert kernels.served_by == "reference"
    k, v = some_rows(fmt, fmt.page_tokens + 1)
    out = kernels.attend(0, filled(kernels, fmt, k, v), one_span(fmt.page_tokens, 1, 1), Rows(k[-1:].float()))
    assert bool(out.isfinite().all())


def test_wrong_inputs_are_named(backend: cpu.CpuBackend) -> None:
    fmt = FloatFormat(64, page_tokens=32)
    kernels = kernels_of(backend, fmt)
    pool = new_pool(fmt, kernels, CPU, 2, 1, range(1))
    ids, rows = torch.tensor([2]), torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="page ids"):
        kernels.seal(0, pool, ids, ids, rows, rows)
    with pytest.raises(ValueError, match="plane k_scale is missing"):
        kernels.install(pool, ids - 2, {"k": torch.zeros(1, 1, 32, 64, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"q is \(1, 1, 32\)"):
        kernels.attend(0, pool, one_span(0, 1, 1), Rows(rows[0, :, :1, :32].float()))
