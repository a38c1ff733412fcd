"""Decode that reads some pages: the paper's choice, the same on every path. A choice of all pages changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hack_kernels import load
from hack_kernels.base import Pool
from hack_kernels.bounded import LEAST, MOST
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv.batch import Batch, Span
from hackkv.codecs import make_codec
from hackkv.codecs.paged import PagedCodec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.types import KvShape
from tests.decode_node.calls import go_on_in_few_pages
from tests.pair import PI, greedy, prompt, tiny_worker

HEADS, GROUP, DIM = 2, 3, 64
PAGES = 12
NARROW: dict[str, int | str] = {"budget": "80%", "select": "40%", "least": 2}
"""Settings by which pages are left out even of the short sequences of tests."""
UNDER = ("fp16", "hack", "rot-k4v4")


def made(layers: int = 6, /, **given: int | str) -> PagedCodec:
    config = CodecConfig(name="mpcache", settings={"page_tokens": PI, **given})
    codec = make_codec(config, KvShape(layers, HEADS, DIM), load("auto"))
    assert isinstance(codec, PagedCodec)
    return codec


def chosen_by_the_paper(q: Tensor, keys: Tensor, share: float, least: int, alpha: float) -> list[int]:
    """The pages that a KV head reads, by Eq. 2 at two levels: q [G, D], keys [pages, Π, D]."""
    pages = len(keys)
    count = min(pages, max(least, math.ceil(pages * share)))

    def alike(rows: Tensor) -> float:
        bound = alpha * rows.amax(0).double() + (1 - alpha) * rows.amin(0).double()
        return float((q.double().sum(0) * bound).sum())

    def best(candidates: Sequence[int], scores: Sequence[float], number: int) -> list[int]:
        ends = {min(candidates, default=0), max(candidates, default=0)}
        ranked = sorted(candidates, key=lambda i: (i not in ends, -scores[i]))
        return sorted(ranked[:number])

    left = list(range(pages))
    if share < 0.5:
        pairs = [keys[i : i + 2].flatten(0, 1) for i in range(0, pages, 2)]
        kept = best(range(len(pairs)), [alike(pair) for pair in pairs], max(2, math.ceil(len(pairs) / 2)))
        left = [page for page in left if page // 2 in kept]
    scores = [alike(page) for page in keys]
    few = best(left, scores, count)
    others = sorted(set(range(pages)) - set(left), key=lambda i: -scores[i])
    return sorted([*few, *others[: count - len(few)]])


def filled(codec: PagedCodec, seed: int) -> tuple[Pool, Tensor]:
    """A pool whose pages hold random keys, and the keys [pages, Hkv, Π, D] float16."""
    pool = codec.new_pools(PAGES, 3, range(HEADS))[0]
    k, v = (
        torch.randn(PAGES, HEADS, PI, DIM, generator=torch.Generator().manual_seed(seed + i)).half() for i in (0, 1)
    )
    tail = 8 * torch.randn(PAGES, HEADS, 1, DIM, generator=torch.Generator().manual_seed(seed + 2)).half()
    kernels = codec.layers[0].kernels
    kernels.seal(0, pool, torch.arange(PAGES), torch.zeros(PAGES, dtype=torch.int64), k + tail, v)
    return pool, k + tail


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, PAGES * PI - 1), min_size=1, max_size=3),
    share=st.sampled_from([5, 20, 40, 49.9, 50, 75, 99]),
    least=st.integers(2, 5),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 100),
)
def test_pages_are_those_of_the_paper(lengths: list[int], share: float, least: int, alpha: float, seed: int) -> None:
    codec = made(1, select=f"{share}%", least=least, alpha=str(alpha))
    pool, keys = filled(codec, seed)
    pages = tuple(torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist())
    q = torch.randn(len(lengths), HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(seed + 9))
    batch = Batch.of([Span(slot, held, 1, pages) for slot, held in enumerate(lengths)], PI)
    seen = codec.visible(0, pool, batch, q)
    # Where no sequence has pages to choose from, heads share one list.
    table = seen.table if seen.table.dim() == 3 else seen.table[:, None].expand(-1, HEADS, -1)
    for b, held in enumerate(lengths):
        count = int(seen.starts[b]) // PI
        assert int(seen.starts[b]) % PI == held % PI
        for head in range(HEADS):
            of_head = keys[list(pages[: held // PI]), head]
            group = q[b, head * GROUP : (head + 1) * GROUP]
            wanted = chosen_by_the_paper(group, of_head, share / 100, least, alpha)
            assert table[b, head, :count].tolist() == [pages[page] for page in wanted]


@pytest.mark.parametrize("under", UNDER)
def test_bounds_are_those_of_the_rows_and_survive_the_wire(under: str) -> None:
    """This holds in any page format, and the codec's kernels write and read the same bytes as without bounds."""
    codec = made(1, of=under)
    pool, keys = filled(codec, 3)
    ids = torch.tensor([4, 0, 7])
    assert torch.equal(pool.planes[LEAST], keys.amin(2))
    assert torch.equal(pool.planes[MOST], keys.amax(2))
    landed = codec.new_pools(PAGES, 1, range(HEADS))[0]
    codec.from_wire(0, landed, torch.tensor([1, 2, 3]), codec.to_wire(0, pool, ids))
    for name, plane in landed.planes.items():
        assert torch.equal(plane[[1, 2, 3]], pool.planes[name][ids]), name


def test_layers_after_the_second_read_in_pairs() -> None:
    codec = made(6, **NARROW)
    pool, _ = filled(codec, 1)
    batch = Batch.of([Span(0, PAGES * PI - 1, 1, tuple(range(PAGES)))], PI)
    queries = [torch.randn(1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    seen = [codec.visible(layer, pool, batch, q).table for layer, q in enumerate(queries)]
    assert [seen[layer] is seen[layer - 1] for layer in range(1, 6)] == [False, False, True, False, True]
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("under", UNDER)
def test_a_selection_of_all_pages_changes_no_token(under: str) -> None:
    request = greedy("r", prompt(1, 9 * PI + 3), PI, ignore_eos=True)
    all_pages, none_left_out, some = (
        generate(tiny_worker("mpcache", of=under, budget="80%", **settings), request)
        for settings in ({"select": "100%"}, {"select": "99%", "least": 100}, {"select": "10%", "least": 2})
    )
    assert all_pages == none_left_out
    assert some != all_pages


@pytest.mark.parametrize("under", UNDER)
async def test_a_cluster_reads_what_one_process_reads_through_replays_and_swaps(under: str) -> None:
    """A replay runs row by row, so it reads the same pages as decode did."""
    worker = tiny_worker("mpcache", of=under, **NARROW)
    requests = [greedy(f"r{i}", prompt(i, 6 * PI + 7 * i), PI + 9, ignore_eos=True) for i in range(4)]
    await go_on_in_few_pages(worker, requests, 5, num_pages=22)


@pytest.mark.parametrize("chunk_pages", [1, 3])
def test_prompts_see_all_pages_whatever_the_chunks(chunk_pages: int) -> None:
    """This holds for a last chunk of one row too."""
    worker, request = tiny_worker("mpcache", **NARROW), greedy("r", prompt(1, 9 * PI + 1), 9, ignore_eos=True)
    assert generate(worker, request, chunk_pages=chunk_pages) == generate(worker, request, chunk_pages=10)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"of": "rot-k3v2"}, "select: pages are chosen where all but the open one rest alike"),
        ({"of": "hack", "open_page": "requantize"}, "select: pages are chosen"),
        ({"select": "x"}, "codec.settings.select: .*'x' is neither"),
        ({"least": 1}, "codec.settings.least"),
        ({"alpha": 2}, "codec.settings.alpha"),
    ],
)
def test_bad_settings_are_refused_by_their_names(wrong: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**wrong)
