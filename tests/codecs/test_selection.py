"""A codec may attend to some of a sequence's pages, and to different pages for each KV head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hack_kernels import BACKENDS, load
from hack_kernels.base import Backend, BackendUnavailable, PageFormat, PageKernels, Pool, Rows, Spans
from hack_kernels.hack_format import HackFormat, OpenPage
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat

from hackkv.choices import some_pages
from hackkv.model.generate import generate
from tests.codecs.examples import SelectingCodec, worker_of
from tests.pair import PI, greedy, prompt, tiny_worker

HEADS = 2
FORMATS: dict[str, tuple[PageFormat, Callable[[Any, torch.device], PageKernels]]] = {
    "rows": (RowFormat(64, PI), RowReference),
    "codes": (HackFormat(64, PI), HackReference),
    "open codes": (HackFormat(64, PI, open_page=OpenPage.K_CODES), HackReference),
}


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_pages_in_any_order_are_attention_to_all(shuffle: bool) -> None:
    request = greedy("r", prompt(2, 6 * PI + 5), PI, ignore_eos=True)
    found = generate(worker_of(SelectingCodec(1.0, shuffle=shuffle)), request)
    assert [t.token_id for t in found] == [t.token_id for t in generate(tiny_worker("fp16"), request)]


def test_half_of_the_pages_is_half_of_the_reading() -> None:
    codec = SelectingCodec(0.5)
    generate(worker_of(codec), greedy("r", prompt(2, 6 * PI), PI // 2, ignore_eos=True))
    assert codec.held_pages == 2 * codec.read_pages > 0


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == "triton" else name for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return load(request.param)
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_for_each_head_reads_what_it_lists(backend: Backend, kind: str) -> None:
    """Both heads in one call give the same as each head alone over its own list."""
    kernels, pool = filled(backend, kind)
    start, one, zero = (torch.tensor([x]) for x in (4 * PI + 2, 1, 0))
    where = Spans(start, one, zero, torch.arange(4)[None], zero)
    table = torch.tensor([[[3, 0], [1, 2]]])
    q = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3))
    both = kernels.attend(0, pool, some_pages(where, PI, table, torch.tensor([2])), Rows(q))
    for head in range(HEADS):
        alone = some_pages(where, PI, table[:, head], torch.tensor([2]))
        one = kernels.attend(0, pool, alone, Rows(q))[:, 3 * head : 3 * head + 3]
        assert torch.allclose(both[:, 3 * head : 3 * head + 3], one, rtol=1e-6, atol=1e-6)


def filled(backend: Backend, kind: str) -> tuple[PageKernels, Pool]:
    """Four sealed pages and an open one, of random rows."""
    generator = torch.Generator().manual_seed(1)
    fmt, definition = FORMATS[kind]
    kernels = backend.kernels_for(fmt, definition)
    pool = new_pool(fmt, kernels, backend.device, 4, 1, range(HEADS))
    k, v = (torch.randn(4, HEADS, PI, 64, generator=generator).half() for _ in range(2))
    kernels.seal(0, pool, torch.arange(4), torch.arange(4) * PI, k, v)
    pool.open_k.copy_(torch.randn(pool.open_k.shape, generator=generator))
    pool.open_v.copy_(torch.randn(pool.open_v.shape, generator=generator))
    return kernels, pool
