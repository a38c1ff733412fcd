"""Pages whose values are read one by one, as Triton interprets their kernels: the definition's bytes, FP64's attention.

Formats are those of the codecs' presets, in small pages, and those of the table of formats that kernels take.
"""

from __future__ import annotations

import pytest
import torch
from hack_kernels import load
from hack_kernels.base import Pool, Rows
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.hack_format import HackFormat
from hack_kernels.pools import new_pool
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.reading import ReadingReference, heads_of
from torch import Tensor

from hackkv.codecs import CODECS, make_codec
from hackkv.codecs.cachegen import make_cachegen
from hackkv.codecs.floats import make_floats
from hackkv.codecs.kivi import make_kivi
from hackkv.codecs.kvcomp import make_kvcomp
from hackkv.codecs.kvquant import make_kvquant
from hackkv.config import CodecConfig
from hackkv.types import KvShape
from tests.hack_kernels.pools import random_rows
from tests.hack_kernels.reading import (
    DELTAS,
    FLOATS,
    GROUPS,
    HUFFMANS,
    NUQS,
    assert_same_bytes,
    definition,
    filled,
    one_span,
    unfused,
)
from tests.hack_kernels.reading import kernels_of as any_kernels_of
from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch, largest_error

pytest.importorskip("triton")

from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.floats import WIDEST
from hack_kernels.triton.reading import InRecords

CPU = torch.device("cpu")
HEADS = 2
SMALL = 32
LAYERS = 12
"""Layers in which a preset has all of its formats."""
EPSILON = torch.finfo(torch.float16).eps


def presets() -> list[ReadFormat]:
    """The formats of the codecs' presets, in heads of 64 channels."""
    found = list[ReadFormat]()
    for name, row in CODECS.items():
        if row.make in (make_floats, make_kivi, make_cachegen, make_kvquant, make_kvcomp):
            config = CodecConfig(name=name, settings={"page_tokens": SMALL})
            formats = make_codec(config, KvShape(LAYERS, 1, 64), load("reference")).formats
            found += [fmt for fmt in formats if isinstance(fmt, ReadFormat)]
    return list(dict.fromkeys(found))


OTHERS: list[ReadFormat] = [
    *(fmt for fmt in FLOATS if fmt.head_dim <= WIDEST),
    *(GROUPS[i] for i in (0, 1, 4, 5)),
    *(DELTAS[i] for i in (1, 3)),
    *(fmt for fmt in NUQS if fmt.head_dim <= WIDEST),
    *HUFFMANS,
    GroupFormat(96, Grouping(2, 64, by_channel=True), Grouping(4, 16), 64),
    GroupFormat(128, Grouping(2, 128, centre=1), Grouping(5, 128, centre=15), 32),
]
FORMATS = list(dict.fromkeys([*presets(), *OTHERS]))
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def kernels_of(fmt: ReadFormat) -> InRecords:
    found = any_kernels_of(TritonBackend(CPU), fmt)
    assert isinstance(found, InRecords)
    assert found.served_by == "triton"
    return found


def sealed(kernels: ReadingReference, fmt: ReadFormat, batch: DecodeBatch, loud: float) -> Pool:
    """A pool with the batch's pages sealed. In every second page, K is multiplied by `loud` and V divided by it."""
    count, heads = batch.k.shape[:2]
    pool = new_pool(fmt, kernels, CPU, count, 1, range(heads))
    ids = torch.arange(count)
    factor = loud ** (ids % 2)[:, None, None, None]
    kernels.seal(0, pool, ids, ids * 0, (batch.k * factor).half(), (batch.v / factor).half())
    return Pool(pool.planes, batch.open_k, batch.open_v)


def stood_for(kernels: ReadingReference, pool: Pool) -> tuple[Tensor, Tensor]:
    k, v = (
        kernels.dequantize(name, planes, heads_of(pool))
        for name, planes in ((name, {n: x for n, x in pool.planes.items() if n.split("_")[0] == name}) for name in "kv")
    )
    return k, v


@every_format
def test_bytes_equal_the_definition(fmt: ReadFormat) -> None:
    assert_same_bytes(kernels_of(fmt), fmt, HEADS)


@every_format
@pytest.mark.parametrize("loud", [1.0, 4.0])
def test_decode_equals_fp64_on_what_the_codes_stand_for(fmt: ReadFormat, loud: float) -> None:
    """Scales of pages differ by up to a factor of sixteen."""
    page_tokens = fmt.page_tokens
    batch = decode_batch(HackFormat(fmt.head_dim, page_tokens), [3 * page_tokens + 1, 0], heads=1, group=3)
    kernels = kernels_of(fmt)
    pool = sealed(kernels, fmt, batch, loud)
    out = kernels.attend(0, pool, batch.spans, Rows(batch.q.half()))
    assert out.dtype is torch.float16
    # Queries, weights and outputs are rounded to FP16. Scores grow with the size of keys.
    assert largest_error(out, batch.exact(*stood_for(kernels, pool))) < 3 * loud * EPSILON


@every_format
def test_a_quiet_row_of_values_keeps_its_weight_beside_a_loud_one(fmt: ReadFormat) -> None:
    """Weights are multiplied by the scales of V before they become FP16, so that small ones are not lost."""
    shape = HackFormat(fmt.head_dim, fmt.page_tokens)
    kernels, batch = kernels_of(fmt), decode_batch(shape, [fmt.page_tokens], heads=1, group=1)
    v = batch.v.sign() * 2.0**-8
    v[:, :, 5] = 8.0
    k = torch.zeros_like(batch.k)
    k[:, :, 5] = -batch.q.half()[0, 0] * 4  # so the loud row has next to no weight
    ids = torch.arange(len(k))
    pool = new_pool(fmt, kernels, CPU, len(k), 1, range(1))
    kernels.seal(0, pool, ids, ids * 0, k, v)
    pool = Pool(pool.planes, batch.open_k, batch.open_v)
    out = kernels.attend(0, pool, batch.spans, Rows(batch.q.half()))
    assert largest_error(out, batch.exact(*stood_for(kernels, pool))) < 3 * 4 * EPSILON


@every_format
def test_prompts_equal_the_definition(fmt: ReadFormat) -> None:
    """Prompts start at the first row, inside a page, or with the last row. The definition has FP32 queries."""
    pi = fmt.page_tokens
    n = 2 * pi + 5
    k, v = (random_rows(seed, n, HEADS, fmt.head_dim).half() for seed in (1, 2))
    q = random_rows(3, n, HEADS * 3, fmt.head_dim).half()
    ours, theirs = kernels_of(fmt), definition(fmt)
    pools = [filled(each, fmt, k, v) for each in (ours, theirs)]
    for start in (0, pi - 1, n - 1):
        span, rows, own = one_span(start, n - start, 2), slice(start, n), start // pi * pi
        for pool in pools:
            for slot, x in ((pool.open_k, k), (pool.open_v, v)):
                slot[0, :, : start - own] = x[own:start].transpose(0, 1)
        found = ours.attend(0, pools[0], span, Rows(q[rows], k[rows], v[rows]))
        expected = theirs.attend(0, pools[1], span, Rows(q[rows].float(), k[rows], v[rows]))
        assert found.dtype is torch.float16
        # Only the result is rounded. On a GPU weights are also rounded, to TF32.
        assert largest_error(found, expected.double()) < EPSILON


@every_format
def test_lists_of_pages_by_head_are_read(fmt: ReadFormat) -> None:
    """After an eviction each head has its own list of pages."""
    pi, pages = fmt.page_tokens, 3
    k, v = (random_rows(seed, pages * pi, HEADS, fmt.head_dim).half() for seed in (1, 2))
    ours, theirs = kernels_of(fmt), definition(fmt)
    q = random_rows(3, 1, HEADS * 4, fmt.head_dim).half()
    lists = torch.stack((torch.arange(pages).flip(0), torch.arange(pages)))[None]
    outs = []
    for kernels, queries in ((ours, q), (theirs, q.float())):
        pool, one = filled(kernels, fmt, k, v), one_span(2 * pi, 1, pages)
        pool.open_k[0, :, 0], pool.open_v[0, :, 0] = 1.0, -1.0
        spans = type(one)(one.starts, one.counts, one.offsets, lists, one.slots)
        outs.append(kernels.attend(0, pool, spans, Rows(queries)))
    assert largest_error(outs[0], outs[1].double()) < 3 * EPSILON


every_preset = pytest.mark.parametrize("fmt", presets(), ids=str)


@every_preset
def test_fp32_queries_are_the_definitions(fmt: ReadFormat) -> None:
    batch = decode_batch(HackFormat(64, SMALL), [70, 5], heads=1, group=3)
    theirs, ours = definition(fmt), kernels_of(fmt)
    open_k, open_v = batch.open_k.nan_to_num(), batch.open_v.nan_to_num()
    expected, found = (
        each.attend(0, Pool(sealed(each, fmt, batch, 2.0).planes, open_k, open_v), batch.spans, Rows(batch.q))
        for each in (theirs, ours)
    )
    assert torch.equal(found, expected)


@every_preset
def test_planes_that_are_not_of_one_record_are_refused(fmt: ReadFormat) -> None:
    kernels = kernels_of(fmt)
    planes = {name: plane.clone() for name, plane in kernels.new_planes([fmt], 2, 2)[0].items()}
    rows, ids = torch.zeros(1, 2, SMALL, 64, dtype=torch.float16), torch.tensor([0])
    with pytest.raises(ValueError, match=r"has strides .* records of \d+ B"):
        kernels.seal(0, Pool(planes, rows, rows), ids, ids, rows, rows)


@pytest.mark.parametrize(
    "fmt",
    [
        unfused(FloatFormat(64)),
        FloatFormat(64, page_tokens=40),
        FloatFormat(256),
        unfused(GroupFormat(64, Grouping(2, 32, by_channel=True), Grouping(2, 32))),
        GroupFormat(256, Grouping(2, 32, by_channel=True), Grouping(4, 16)),
        GroupFormat(64, Grouping(4, 8, by_channel=True), Grouping(4, 32)),
        GroupFormat(96, Grouping(4, 16, by_channel=True), Grouping(2, 96)),
        GroupFormat(64, Grouping(4, 64, centre=7), Grouping(4, 32)),
        unfused(GroupFormat(64, Grouping(5, 64, centre=15), Grouping(4, 64, centre=7))),
        *map(unfused, (DELTAS[0], NUQS[0], HUFFMANS[0])),
        DELTAS[2],
        NUQS[4],
    ],
    ids=str,
)
def test_other_formats_are_served_by_the_definition(fmt: ReadFormat) -> None:
    assert any_kernels_of(TritonBackend(CPU), fmt).served_by == "reference"


def test_a_pool_of_later_heads_has_their_tables() -> None:
    """With calibration each KV head of the model has ranges of its own; a pool may hold the heads from 1 on."""
    fmt = next(fmt for fmt in NUQS if fmt.calibrated)
    pi, pages = fmt.page_tokens, 2
    k, v = (random_rows(seed, pages * pi, 1, fmt.head_dim).half() for seed in (1, 2))
    q = random_rows(3, 1, 4, fmt.head_dim).half()
    outs = []
    for kernels, queries in ((kernels_of(fmt), q), (definition(fmt), q.float())):
        pool, span = new_pool(fmt, kernels, CPU, pages, 1, range(1, 2)), one_span(pages * pi, 1, pages)
        paged = (x.unflatten(0, (pages, pi)).transpose(1, 2) for x in (k, v))
        kernels.seal(0, pool, torch.arange(pages), torch.arange(pages) * pi, *paged)
        pool.open_k[0, :, 0], pool.open_v[0, :, 0] = 1.0, -1.0
        outs.append(kernels.attend(0, pool, span, Rows(queries)))
    assert largest_error(outs[0], outs[1].double()) < 3 * EPSILON
