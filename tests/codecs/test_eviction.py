"""Rows are not positions: a codec that gives up most of a prompt's rows goes through the whole life of a request."""

from __future__ import annotations

import pytest
import torch

from decode_node.config import DecodeSettings
from hackkv.codec import Span, rows_held
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.types import HandedOff
from tests.codecs.examples import EvictingCodec, SinksAndWindow, worker_of
from tests.decode_node.calls import begun_together, held_up
from tests.pair import PI, greedy, paired, prompt, tiny_worker

LENGTHS = (5, PI, 3 * PI, 4 * PI, 7 * PI + 11)


def test_what_stays_is_the_beginning_and_the_end() -> None:
    worker = worker_of(EvictingCodec())
    runner, pages, tokens = ModelRunner(worker.model, worker.codec, 9, 1), (8, 3, 0, 5, 1, 7, 2), 6 * PI + 4
    runner.forward([Span(0, 0, tokens, pages)], prompt(1, tokens))
    pool = runner.memory.pools[1]
    before = {name: plane.clone() for name, plane in pool.planes.items()}
    SinksAndWindow().evict(pool, Span(0, 0, tokens, pages))
    assert rows_held(worker.codec, tokens) == 3 * PI + 4
    for name, plane in pool.planes.items():
        for now, old in ((8, 8), (3, 1), (0, 7)):
            assert torch.equal(plane[now], before[name][old]), (name, now)


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_are_those_of_one_process_and_fewer_pages_travel(length: int) -> None:
    """Also where nothing is old enough to go: then they are the tokens of `fp16`."""
    worker, request = worker_of(EvictingCodec()), greedy("r", prompt(length, length), 2 * PI, ignore_eos=True)
    async with paired(worker) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.tokens == generate(worker, request)
    whole = generate(tiny_worker("fp16"), request)
    assert (served.tokens == whole) == (length // PI <= 3)
    handed_off = served.handed_off
    assert isinstance(handed_off, HandedOff)
    footprint = worker.footprint
    assert sum(count for _, count in handed_off.receipt.bytes_by_plane) == footprint.wire_bytes(
        rows_held(worker.codec, length)
    )
    assert handed_off.receipt.tokens == length


async def test_it_goes_on_after_a_failover_and_through_swaps() -> None:
    """Replays start behind the rows that stayed; five sequences take turns in the pages of two."""
    worker = worker_of(EvictingCodec())
    requests = [greedy(f"r{i}", prompt(i, 5 * PI + 7 * i), 2 * PI, ignore_eos=True) for i in range(5)]
    whole = [generate(worker, request) for request in requests]
    decode, begin = held_up(worker)
    async with paired(worker, decode, num_pages=16, decoding=DecodeSettings(replay_tokens=PI)) as nodes:
        serving = (
            nodes.serve(request, emitted=tuple(token.token_id for token in tokens[: PI + 3]))
            for request, tokens in zip(requests, whole, strict=True)
        )
        served = await begun_together(nodes, begin, sum(len(each.prompt_ids) for each in requests), serving)
        await nodes.assert_idle()
    assert sum(result.swaps for result in served) > 0
    assert [result.tokens for result in served] == [tokens[PI + 3 :] for tokens in whole]


async def test_a_prefix_that_lost_rows_is_nobody_elses() -> None:
    worker = worker_of(EvictingCodec())
    first, second = (greedy(f"r{i}", prompt(3, 6 * PI) + prompt(i, 9), 4) for i in range(2))
    async with paired(worker) as nodes:
        await nodes.serve(first)
        served = await nodes.serve(second)
        stats = dict((await nodes.prefill.describe()).stats)
    assert served.prefilled.computed_tokens == len(second.prompt_ids)
    assert stats["hackkv_prefix_pages"] == 0
    assert served.tokens == generate(worker, second)
