"""The decode node as its router sees it, fed by a real prefill node over an in-process wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from decode_node import steps
from decode_node.config import DecodeSettings
from hackkv.kv_memory import KvMemory
from hackkv.model.generate import generate
from hackkv.types import (
    Finish,
)
from prefill_node import passes
from tests.pair import PI, TIMEOUT_S, greedy, paired, prompt, tiny_worker
from tests.polling import POLL_S

LENGTHS = (1, PI - 1, PI, PI + 1, 2 * PI, 70)


@pytest.mark.parametrize(
    ("codec", "settings"),
    [("fp16", {}), ("hack", {}), ("hack-k4v2", {}), ("hack-paper", {}), ("hack-paper", {"send_sums": True})],
    ids=str,
)
async def test_prefill_handoff_decode_equals_one_process(codec: str, settings: dict[str, bool]) -> None:
    """All requests run at once, greedy in FP32. Joining and leaving the batch changes no token."""
    worker = tiny_worker(codec, **settings)
    requests = [greedy(f"r{n}", prompt(n, n), 3 + n % 4) for n in LENGTHS]
    async with paired(worker, decoding=DecodeSettings(max_batch=4)) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests))
        await nodes.assert_idle()
        info = await nodes.decode.describe()
        assert dict(info.stats)["hackkv_received_tokens_total"] == sum(LENGTHS)
    assert [result.tokens for result in served] == [generate(worker, request) for request in requests]
    for result in served:
        assert result.decoded is not None
        assert result.decoded.decode_s >= result.decoded.attend_s >= result.decoded.approximation_s >= 0
        assert result.decoded.queue_s >= 0


async def test_sampled_tokens_are_those_of_one_process() -> None:
    """The draw for token i depends on the seed and i only; penalties see prompt and output across both nodes."""
    worker = tiny_worker("hack")
    request = greedy("r", prompt(3, 45), 12, logprobs=2)
    sampling = replace(request.sampling, seed=-7, temperature=0.9, top_p=0.95, frequency_penalty=0.5)
    request = replace(request, sampling=replace(sampling, repetition_penalty=1.2))
    async with paired(worker) as nodes:
        served = await nodes.serve(request)
    assert served.tokens == generate(worker, request)


async def test_requantization_runs_through_prefill_wire_and_decode() -> None:
    """Ablation HACK/RQE: no open page travels, and decode goes on in the codes of the last page."""
    worker = tiny_worker("hack", open_page="requantize")
    request = greedy("r", prompt(5, PI + 20), PI)
    async with paired(worker, chunk_pages=4) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.handed_off is not None
    assert not any(name.startswith("open") for name, _ in served.handed_off.receipt.bytes_by_plane)
    assert served.tokens == generate(worker, request)


async def test_eos_ends_a_sequence_within_the_batch() -> None:
    worker = tiny_worker("hack")
    request = greedy("r", prompt(6, 40), 9)
    tokens = generate(worker, request)
    stop = next(token for token in tokens[2:] if token.token_id not in [t.token_id for t in tokens[:2]])
    ending = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop.token_id,)))
    async with paired(worker) as nodes:
        served = await nodes.serve(ending)
        await nodes.assert_idle()
    assert served.tokens[-1] == replace(stop, finish=Finish.STOP)
    assert served.tokens[:-1] == tokens[: stop.index]


async def test_idle_nodes_hold_no_memory_for_rows_of_sequences_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later request in slots whose memory was freed has the same answer."""
    for room in (steps, passes):
        monkeypatch.setattr(room, "REST_S", 0.01)
    forget, given_back = KvMemory.forget_slots, dict[KvMemory, int]()

    def heard(memory: KvMemory, slots: Iterable[int]) -> None:
        forget(memory, slots := tuple(slots))
        given_back[memory] = len(slots)

    monkeypatch.setattr(KvMemory, "forget_slots", heard)
    worker = tiny_worker("rot-k3v2")
    async with paired(worker) as nodes:
        for number in range(3):
            given_back.clear()
            request = greedy(f"r{number}", prompt(number, 3 * PI + 5), 4)
            assert (await nodes.serve(request)).tokens == generate(worker, request)
            async with asyncio.timeout(TIMEOUT_S):
                # A prefill node copies from the slot of its last prompt before its next pass.
                while sorted(given_back.values()) != [8, 31]:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
