"""The simulator's schedulers decide as live nodes did: node choices, batches, swaps, chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import router.fleet.desks as desks
from decode_node.scheduler import SchedulerLimits
from hackkv.codecs import CODECS
from hackkv.errors import ConfigError, Overloaded
from hackkv.model.tiny import Tiny, write_tiny
from router.fleet.policy import DecodeLoad, Need, PrefillLoad, pick_decode, pick_prefill
from sim.placing import Shelf
from sim.replay import SchedulerCall, Tape, read_tape, record_decode, record_prefill, replay_decode, replay_prefill
from tests.e2e.in_process import in_process_cluster
from tests.kinds import in_a_cluster
from tests.pair import DECODING, PI, greedy, paired, prompt, tiny_worker
from tests.sim.clusters import weightless

WEIGHTLESS = "nodes without weights"


@pytest.mark.parametrize("codec", [*in_a_cluster(sorted(set(CODECS) - {"mpcache"})), "mpcache", WEIGHTLESS])
async def test_batches_chunks_and_swaps(codec: str, tmp_path: Path) -> None:
    """Sequences want more pages than there are on real nodes. Then the simulator's books get the same calls."""
    pages, requests = 9, [greedy(f"r{i}", prompt(i, PI + 8 + 7 * i), 2 * PI - 10) for i in range(7)]
    decoding, passes = Tape(), Tape()
    worker = weightless(tmp_path / "model", "hack") if codec == WEIGHTLESS else tiny_worker(codec)
    async with paired(worker, num_pages=pages) as nodes:
        decoder, prefiller = nodes.decode._scheduler, nodes.prefill._scheduler
        record_decode(decoder, decoding)
        record_prefill(prefiller, passes)

        async def serve(number: int) -> int:
            while True:
                try:
                    return len((await nodes.serve(requests[number])).tokens)
                except Overloaded:  # others wait in host memory; refusals are on the tape too
                    await asyncio.sleep(0)

        served = await asyncio.gather(*map(serve, range(len(requests))))
        await nodes.assert_idle()
    assert sum(served) > len(requests)
    decoding.write(tmp_path / "decode.jsonl")
    limits = SchedulerLimits(DECODING.host_bytes, DECODING.max_batch, DECODING.replay_tokens)
    read = read_tape(tmp_path / "decode.jsonl")
    assert replay_decode(read, decoder, pages, DECODING.max_sequences, limits) == []
    plans = [call.answer for call in decoding.calls if call.name == "schedule"]
    assert max(len(turns) for turns, _, _ in plans) > 1
    assert len(read.step_seconds()) == sum(call.name == "stepped" for call in decoding.calls) > 0
    page_tokens = decoder.footprint.page_tokens
    assert replay_prefill(passes, 10 * pages, 64, page_tokens, 2 * PI) == []
    assert {call.name for call in passes.calls} >= {"add", "schedule", "commit", "leave"}


def test_another_decision_is_found() -> None:
    calls = [
        SchedulerCall("add", 0.0, [0, 100]),
        SchedulerCall("schedule", 0.1, [True], [[0, 0, 64]]),
        SchedulerCall("commit", 0.2, []),
    ]
    assert replay_prefill(Tape(calls), 10, 4, 32, 64) == []
    wrong = [calls[0], replace(calls[1], answer=[[0, 0, 32]])]
    assert "[[0, 0, 64]] and not [[0, 0, 32]]" in replay_prefill(Tape(wrong), 10, 4, 32, 64)[0]


def test_a_torn_tape_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"name": "land"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:1"):
        read_tape(tmp_path / "t.jsonl")


async def test_node_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router with four nodes serves requests. The simulator's shelf makes the same choice each time."""
    seen: list[tuple[list[Any], Need | None, str | None]] = []

    def prefill(nodes: Iterable[PrefillLoad], now: float, avoid: Any) -> str | None:
        loads = list(nodes)
        choice = pick_prefill(loads, now, avoid)
        seen.append((loads, None, choice))
        return choice

    def decode(nodes: Iterable[DecodeLoad], need: Need, now: float, avoid: Any) -> str | None:
        loads = list(nodes)
        choice = pick_decode(loads, need, now, avoid)
        seen.append((loads, need, choice))
        return choice

    monkeypatch.setattr(desks, "pick_prefill", prefill)
    monkeypatch.setattr(desks, "pick_decode", decode)
    write_tiny(tmp_path, Tiny(layers=2, max_context=1024))
    async with in_process_cluster(tmp_path, tiny_worker(), "inproc", 2) as client:
        body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={**body, "prompt": list(prompt(i, 40 + 9 * i))}) for i in range(12))
        )
    assert [answer.status_code for answer in answers] == [200] * 12
    chosen = [choice for _, _, choice in seen if choice is not None]
    assert len(set(chosen)) == 4
    for loads, need, choice in seen:
        assert _by_shelf(loads, need) == choice


def _by_shelf(loads: list[Any], need: Need | None) -> str | None:
    """The simulator's choice over the same loads."""
    loads = sorted(loads, key=lambda load: str(load.node_id))
    names = [load.node_id for load in loads]
    pages = [0 if need is None else load.total_pages for load in loads]
    shelf = Shelf(names, pages, 1 if need is None else loads[0].page_tokens)
    for load in sorted(loads, key=lambda load: int(load.chosen_at)):
        if load.chosen_at:
            shelf.choose(names.index(load.node_id))
    for index, load in enumerate(loads):
        shelf.mark(index, up=not load.draining)
        if need is None:
            shelf.book(index, load.queued_tokens)
        else:
            shelf.book(index, load.outstanding_tokens)
            shelf.free[index] = load.free_pages
    found = shelf.pick_prefill() if need is None else shelf.pick_decode(need)
    return None if found is None else names[found]
