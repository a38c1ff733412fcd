"""Decode over FP8 pages, as Triton interprets it, against FP64 attention on what the codes stand for."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.base import Pool, Rows
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.hack_format import HackFormat
from hack_kernels.pools import new_pool
from hack_kernels.reference.floats import FloatReference, decode
from torch import Tensor

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch, largest_error

pytest.importorskip("triton")

import triton
import triton.language as tl
from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.floats import FloatTriton, widened

CPU = torch.device("cpu")
SHAPES = [(64, 32), (96, 64), (128, 128)]


def kernels_of(fmt: FloatFormat) -> FloatTriton:
    found = TritonBackend(CPU).kernels_for(fmt, FloatReference)
    assert isinstance(found, FloatTriton)
    return found


def sealed(kernels: FloatReference, fmt: FloatFormat, batch: DecodeBatch, loud: float) -> Pool:
    """Pages of the batch's rows; those of K times `loud`, those of V divided by it, page by page."""
    count, heads = batch.k.shape[:2]
    pool = new_pool(fmt, kernels, CPU, count, 1, range(heads))
    ids = torch.arange(count)
    factor = loud ** (ids % 2)[:, None, None, None]
    kernels.seal(0, pool, ids, ids * 0, (batch.k * factor).half(), (batch.v / factor).half())
    return Pool(pool.planes, batch.open_k, batch.open_v)


def stood_for(kernels: FloatReference, pool: Pool) -> tuple[Tensor, Tensor]:
    k, v = (
        kernels.dequantize(name, {each: pool.planes[each] for each in (name, f"{name}_scale")}) for name in ("k", "v")
    )
    return k, v


@pytest.mark.parametrize(("head_dim", "page_tokens"), SHAPES)
@pytest.mark.parametrize("loud", [1.0, 4.0])
def test_attention_over_codes_equals_fp64(head_dim: int, page_tokens: int, loud: float) -> None:
    """Pages have scales of their own, up to sixteen times apart."""
    fmt = FloatFormat(head_dim, page_tokens=page_tokens)
    batch = decode_batch(HackFormat(head_dim, page_tokens), [3 * page_tokens + 1, 0], heads=1, group=3)
    kernels = kernels_of(fmt)
    pool = sealed(kernels, fmt, batch, loud)
    out = kernels.attend(0, pool, batch.spans, Rows(batch.q.half()))
    assert out.dtype is torch.float16
    # Queries, weights and outputs are rounded to FP16; scores grow with the loudness of keys.
    assert largest_error(out, batch.exact(*stood_for(kernels, pool))) < 3 * loud * torch.finfo(torch.float16).eps


def test_every_code_widens_to_what_it_stands_for() -> None:
    @triton.jit
    def widen(codes, out):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 256)
        tl.store(out + at, widened(tl.load(codes + at)))

    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    widen[(1,)](codes, out)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal((out.float() * 256)[finite], decode(Element.E4M3, codes)[finite])


def test_bytes_are_the_definitions_and_other_queries_are_its_own() -> None:
    fmt, batch = FloatFormat(64, page_tokens=32), decode_batch(HackFormat(64, 32), [70, 5], heads=1, group=3)
    definition, kernels = FloatReference(fmt, CPU), kernels_of(fmt)
    ours, theirs = (sealed(each, fmt, batch, 2.0) for each in (kernels, definition))
    ids = torch.arange(ours.num_pages)
    for name, plane in definition.export(theirs, ids).items():
        assert torch.equal(kernels.export(ours, ids)[name], plane)
    open_k, open_v = batch.open_k.nan_to_num(), batch.open_v.nan_to_num()
    expected, found = (
        each.attend(0, Pool(pool.planes, open_k, open_v), batch.spans, Rows(batch.q))
        for each, pool in ((definition, theirs), (kernels, ours))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "fmt",
    [
        FloatFormat(64, scaling=Scaling.POWER),
        FloatFormat(64, Element.E2M1, Scaling.TWOFOLD),
        FloatFormat(64, fused=False),
        FloatFormat(64, page_tokens=40),
        FloatFormat(256),
    ],
    ids=str,
)
def test_other_pages_of_small_numbers_are_served_by_the_definition(fmt: FloatFormat) -> None:
    assert TritonBackend(CPU).kernels_for(fmt, FloatReference).served_by == "reference"
