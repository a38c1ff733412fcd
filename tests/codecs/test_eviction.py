"""Codecs that evict most rows of a prompt, through the whole life of a request. Rows are then not positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hack_kernels import load
from hack_kernels.base import Backend, Pool
from hack_kernels.bounded import BOUNDS
from hack_kernels.voting import VOTE_BITS, Voting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv.batch import Batch, Span
from hackkv.codec import KvCodec, rows_held
from hackkv.codecs import CODECS, beneath, make_codec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.types import HandedOff, KvShape
from tests.codecs.cases import same_bytes
from tests.decode_node.calls import go_on_in_few_pages
from tests.meta import MetaBackend, NothingComesBack
from tests.pair import EVICTING, PI, greedy, paired, prompt, tiny_worker

LAYERS, HEADS, GROUP, DIM = 4, 2, 2, 64
PAGES = tuple(reversed(range(8)))
UNDER = ("fp16", "hack", "rot-k3v2")
"""Rows; V with scales over a page; exact pages at both ends."""


def made(name: str, backend: Backend | None = None, /, **given: int | float | str | bool) -> KvCodec:
    config = CodecConfig(name=name, settings={"page_tokens": PI, **given})
    return make_codec(config, KvShape(LAYERS, HEADS, DIM), backend or load("auto"))


def some_rows(layer: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a layer, for which attention is far from even."""
    generator = torch.Generator().manual_seed(layer)
    q, k, v = (torch.randn((tokens, heads, DIM), generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS))
    return 2 * q, k, v


def new_pools(codec: KvCodec) -> tuple[Pool, ...]:
    return codec.new_pools(len(PAGES), 1, range(HEADS), prompts=True)


def computed(codec: KvCodec, tokens: int, cuts: Sequence[int] = (), repeat: int = 1) -> tuple[Pool, ...]:
    """The pools of all layers after a prompt and its eviction. Every pass and every eviction runs `repeat` times."""
    pools = new_pools(codec)
    assert codec.eviction is not None
    for held, end in pairwise((0, *cuts, tokens)):
        batch = Batch.of([Span(0, held, end - held, PAGES, prompt=tokens)], PI)
        for layer, pool in enumerate(pools):
            q, k, v = (x[held:end] for x in some_rows(layer, tokens))
            for _ in range(repeat):
                codec.attend(layer, pool, batch, q, k, v)
    for layer in range(LAYERS):
        for _ in range(repeat):
            codec.eviction.evict(layer, pools, Span(0, 0, tokens, PAGES))
    return pools


def left_behind(codec: KvCodec, layer: int, pool: Pool, rows: int) -> list[Tensor]:
    """All bytes of a sequence of `rows` rows."""
    sealed = codec.to_wire(layer, pool, torch.tensor(PAGES[: rows // PI], dtype=torch.int64))
    runs = codec.window.runs(rows, PI)
    return [*sealed.values(), *(opened[0, :, run] for opened in (pool.open_k, pool.open_v) for run in runs)]


def bounds_bytes(codec: KvCodec) -> int:
    """Bytes of the bounds of a page, in the tiny model of two layers."""
    return sum(4 * plane.page_bytes for plane in codec.wire_planes[0] if plane.name in BOUNDS)


def by_the_papers(name: str, layer: int, tokens: int) -> list[list[int]]:
    """The rows that stay of each KV head, by plain sums over a softmax in FP64."""
    q, k, _ = some_rows(layer - layer % 2 if name == "mpcache" and layer >= 2 else layer, tokens)
    queries = q.double().view(tokens, HEADS, GROUP, DIM)
    scores = torch.einsum("ihgd,thd->hgit", queries, k.half().double()) / math.sqrt(DIM)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1).sum(1)  # [Hkv, queries, keys]
    fifth, quarter, eighth = (math.ceil(tokens / part) for part in (5, 4, 8))
    if name == "streamingllm":
        first, last, votes, held = 4, quarter - 4, weights.sum(1), quarter
    elif name == "snapkv":
        first, last, held = 0, 32, max(32, quarter)
        window = weights[:, tokens - 32 :, : tokens - 32].sum(1)
        votes = torch.nn.functional.avg_pool1d(window, 5, stride=1, padding=2)
    elif name == "h2o":
        first, last, votes, held = 0, eighth, weights.sum(1), quarter
    else:
        first, last, votes = 4, 64, weights[:, tokens - fifth :].sum(1)
        held = max(68, quarter)
    found = list[list[int]]()
    for head in votes:
        ranked = sorted(range(first, tokens - last), key=lambda row: -float(head[row]))
        found.append(sorted([*range(first), *ranked[: held - first - last], *range(tokens - last, tokens)]))
    return found


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("name", EVICTING)
def test_what_stays_is_what_the_paper_keeps_sealed_as_if_nothing_else_had_been(name: str, under: str) -> None:
    """The pages of another pool into which only those rows go, through the codec below."""
    tokens, codec, beneath = 7 * PI + 9, made(name, of=under, select="100%"), made(under)
    pools, held = computed(codec, tokens, (2 * PI, 5 * PI)), rows_held(codec, tokens)
    assert PI < held < tokens
    for layer, pool in enumerate(pools):
        stay = torch.tensor(by_the_papers(name, layer, tokens)).T  # [held, Hkv]
        _, k, v = (x[:, :HEADS].gather(0, stay[..., None].expand(-1, -1, DIM)) for x in some_rows(layer, tokens))
        fresh = beneath.new_pools(len(PAGES), 1, range(HEADS))[layer]
        batch = Batch.of([Span(0, 0, held, PAGES)], PI)
        beneath.attend(layer, fresh, batch, torch.zeros(held, HEADS * GROUP, DIM), k, v)
        found, wanted = left_behind(codec, layer, pool, held), left_behind(beneath, layer, fresh, held)
        assert len(found) == len(wanted)
        assert all(same_bytes(*pair) for pair in zip(found, wanted, strict=True)), f"layer {layer}"


@settings(max_examples=12)
@given(cuts=st.sets(st.integers(1, 4 * PI + 4), max_size=5), name=st.sampled_from(EVICTING))
def test_neither_chunks_nor_repeated_passes_change_what_stays(cuts: set[int], name: str) -> None:
    tokens = 4 * PI + 5
    codec = made(name, last=16, budget="40%")
    whole = computed(codec, tokens)
    held = rows_held(codec, tokens)
    for repeat in (1, 2):
        for layer, (pool, other) in enumerate(zip(computed(codec, tokens, sorted(cuts), repeat), whole, strict=True)):
            found, wanted = left_behind(codec, layer, pool, held), left_behind(codec, layer, other, held)
            assert all(same_bytes(*pair) for pair in zip(found, wanted, strict=True))


def test_the_weights_of_a_query_are_one_and_a_key_that_all_ask_for_has_them() -> None:
    q, k, _ = some_rows(1, 40)
    assert torch.allclose(Voting().votes(q, k.transpose(0, 1), 0).sum(-1) / 2.0**VOTE_BITS, torch.tensor(80.0))
    k[7, 1] = 40 * q[20:, 2:].sum((0, 1)).sign()
    q[20:, 2:] = k[7, 1].sign()
    votes = Voting().votes(q[20:], k.transpose(0, 1), 20)
    assert int(votes[1].argmax()) == 7
    assert int(votes[1, 7]) == 40 * 2**VOTE_BITS


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("budget", ["100%", 5 * PI + 3])
def test_a_budget_as_large_as_the_prompt_changes_no_token(under: str, budget: int | str) -> None:
    request = greedy("r", prompt(1, 5 * PI + 3), PI, ignore_eos=True)
    assert generate(tiny_worker("snapkv", of=under, budget=budget), request) == generate(tiny_worker(under), request)


@pytest.mark.parametrize("length", [5, 3 * PI, 7 * PI + 11])
@pytest.mark.parametrize(("name", "under"), [*((name, "fp16") for name in EVICTING), ("snapkv", "rot-k3v2")])
async def test_a_cluster_says_what_one_process_says_and_sends_what_stays(name: str, under: str, length: int) -> None:
    worker = tiny_worker(name, of=under)
    request = greedy("r", prompt(length, length), 2 * PI, ignore_eos=True)
    async with paired(worker) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.tokens == generate(worker, request)
    handed_off, held = served.handed_off, rows_held(worker.codec, length)
    assert isinstance(handed_off, HandedOff)
    assert handed_off.receipt.tokens == length
    sent = sum(count for _, count in handed_off.receipt.bytes_by_plane)
    assert sent == worker.footprint.wire_bytes(held)
    if under == "fp16":
        pages = worker.footprint.sealed(held)
        assert sent == held * worker.footprint.row_bytes + pages * bounds_bytes(worker.codec), (
            "rows that went stay here"
        )


@pytest.mark.parametrize(("name", "under"), [("streamingllm", "fp16"), ("snapkv", "rot-k3v2")])
async def test_it_goes_on_after_a_failover_and_through_swaps(name: str, under: str) -> None:
    """Replays start behind the rows that stayed. Five sequences take turns in the pages of two."""
    worker = tiny_worker(name, of=under, budget="60%")
    requests = [greedy(f"r{i}", prompt(i, 5 * PI + 7 * i), 2 * PI, ignore_eos=True) for i in range(5)]
    await go_on_in_few_pages(worker, requests, PI + 3, num_pages=16)


@pytest.mark.parametrize("name", EVICTING)
async def test_a_prefix_that_lost_rows_is_nobody_elses(name: str) -> None:
    """Neither node keeps a page of such a prefix, so no later prompt can find one."""
    worker = tiny_worker(name)
    first, second = (greedy(f"r{i}", prompt(3, 6 * PI) + prompt(i, 9), 4) for i in range(2))
    async with paired(worker) as nodes:
        await nodes.serve(first)
        served = await nodes.serve(second)
        stats = [dict((await node.describe()).stats) for node in (nodes.prefill, nodes.decode)]
    assert served.prefilled.computed_tokens == len(second.prompt_ids)
    assert (stats[0]["hackkv_prefix_pages"], stats[1]["hackkv_held_pages"]) == (0, 0)
    assert served.tokens == generate(worker, second)


def test_a_node_that_computes_prompts_counts_what_it_notes() -> None:
    """A node that computes no prompts has no notes."""
    codec, sizes = made("snapkv"), tiny_worker("snapkv").footprint
    pool = codec.new_pools(3, 1, range(HEADS))[0]
    assert pool.notes == {}
    noted = sum(note.nbytes for note in new_pools(codec)[0].notes.values())
    assert sizes.noted_bytes == noted // len(PAGES) * 2, "the tiny model has two layers"
    worker = tiny_worker("snapkv")
    kv_bytes = 10 * (sizes.page_bytes + sizes.noted_bytes)
    assert worker.pages_in(kv_bytes, prompts=True) == 10 < worker.pages_in(kv_bytes)
    assert tiny_worker("fp16").footprint.noted_bytes == 0


@pytest.mark.parametrize("name", EVICTING)
def test_nothing_comes_back_from_the_device(name: str) -> None:
    codec, tokens = made(name, MetaBackend()), 3 * PI + 5
    with NothingComesBack(), torch.inference_mode():
        pools = new_pools(codec)
        assert codec.eviction is not None
        for held, count in ((0, 2 * PI), (2 * PI, PI + 4), (tokens - 1, 1)):
            spans = [Span(0, held, count, PAGES, prompt=tokens)]
            batch = Batch.of(spans, PI, pools[0].device)
            for layer, pool in enumerate(pools):
                rows = (torch.empty(count, heads, DIM, device=pool.device) for heads in (HEADS * GROUP, HEADS, HEADS))
                codec.attend(layer, pool, batch, *rows)
        for layer in range(LAYERS):
            codec.eviction.evict(layer, pools, Span(0, 0, tokens, PAGES))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"of": "h2o"}, "codec.settings.of: 'h2o' is not a codec with pages of its own; known: fp16"),
        ({"of": "zip"}, "codec.settings.of: 'zip'"),
        ({"budget": "half"}, "codec.settings.budget: .*'half' is neither a number of rows nor a percentage"),
        ({"budget": -1}, "codec.settings.budget: .*-1 is neither"),
        ({"voters": "101%"}, "codec.settings.voters: .*'101%' is neither"),
        ({"first": -1}, "codec.settings.first"),
        ({"pool": 4}, "codec.settings.pool: .*4 is even"),
        ({"windows": 4}, "codec.settings.windows"),
        ({"of": "hack", "k_bits": 3}, "k_bits is 3"),
    ],
)
def test_bad_settings_are_refused_by_their_names(wrong: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made("snapkv", **wrong)


def test_every_setting_is_in_the_fingerprint() -> None:
    """The settings of the codec below are there too."""
    other: dict[str, int | float | str | bool] = {
        "of": "hack-k4v2",
        "budget": 7,
        "first": 1,
        "last": 3,
        "voters": 5,
        "pool": 3,
        "pairs": True,
        "v_bits": 4,
    }
    plain = dict(made("snapkv", of="hack").fingerprint())
    for key, value in other.items():
        changed = dict(made("snapkv", **{"of": "hack", key: value}).fingerprint())
        assert changed[f"codec.{key}"] == str(value) != plain[f"codec.{key}"]


def test_pages_come_in_any_form_of_the_table() -> None:
    """This holds on the wire too: the codec below chooses how pages are coded."""
    below = [name for name in CODECS if beneath(CodecConfig(name=name)) == name]
    assert len(below) > len(EVICTING)
    for name in below:
        codec, other = made("snapkv", of=name), made(name)
        assert (codec.formats, codec.wire_form.name) == (other.formats, other.wire_form.name)
        assert not codec.lossless
