"""KV stays until its request ends, and can be sent again. Whatever happens, bytes are counted and every state ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hackkv.errors import DeadlineExceeded, FrameRefused, HandshakeRefused, TransferError
from hackkv.types import HandedOff, HandoffFailed, PrefillJob
from tests.pair import greedy
from tests.prefill_node.shipping import (
    FRAME_BYTES,
    FRAMES,
    KV_BYTES,
    PATIENCE,
    Halving,
    benched,
    end,
    frames,
)


async def handed_off(fates: AsyncIterator[HandedOff | HandoffFailed]) -> HandedOff:
    fate = await anext(fates)
    assert isinstance(fate, HandedOff), fate
    return fate


async def failed(fates: AsyncIterator[HandedOff | HandoffFailed]) -> HandoffFailed:
    fate = await anext(fates)
    assert isinstance(fate, HandoffFailed), fate
    return fate


async def test_what_was_handed_off_is_sent_again_as_if_it_had_been_written_in_the_later_epoch() -> None:
    async with benched() as bench:
        shipment = bench.open("t", 4, bench.first.address)
        fates = shipment.fates()
        assert (await handed_off(fates)).epoch == 4
        assert bench.held == (0, 1)
        bench.outbox.assign("t", 9, bench.second.address)
        assert bench.held == (1, 0), "what is sent again is not pushed out meanwhile"
        again = await handed_off(fates)
        assert (again.epoch, again.swap_wait_s, bench.held) == (9, 0.0, (0, 1))
        assert bench.first.taken == [[*frames("t", 4), end("t", 4)]]
        assert bench.second.taken == [[*frames("t", 9), end("t", 9)]]
        await bench.outbox.close(shipment)
        assert (bench.held, bench.outbox.resends) == ((0, 0), 1)
        with pytest.raises(HandshakeRefused, match="transfer t is not known here"):
            bench.outbox.assign("t", 10, bench.first.address)


async def test_a_later_epoch_gives_up_a_push_under_way_and_takes_all_frames_with_it() -> None:
    """The prompt still runs: one frame has left, and the others come after the new assignment."""
    async with benched() as bench:
        bench.first.gate.clear()
        shipment = bench.open("t", 0, bench.first.address, filled=1)
        await bench.first.reached.wait()
        bench.outbox.assign("t", 1, bench.second.address)
        await bench.second.reached.wait()
        for frame in frames("t", 0)[1:]:
            shipment.kv.put(frame)
        shipment.finish(end("t", 0), finished_at=0.0)
        bench.first.gate.set()
        assert (await handed_off(shipment.fates())).epoch == 1
        assert (bench.first.taken, bench.second.taken) == ([], [[*frames("t", 1), end("t", 1)]])
        await bench.outbox.close(shipment)


@pytest.mark.parametrize("error", [FrameRefused("checksum of plane k", "corrupt"), RuntimeError("boom")])
async def test_a_push_that_fails_leaves_the_kv_where_it_is(error: Exception) -> None:
    async with benched() as bench:
        bench.first.error = error
        shipment = bench.open("t", 0, bench.first.address)
        fates = shipment.fates()
        fate = await failed(fates)
        assert (fate.epoch, fate.code) == (0, getattr(error, "code", "internal"))
        assert bench.held == (1, 0)
        bench.outbox.assign("t", 1, "nowhere")
        assert (await failed(fates)).code == "node_lost"
        bench.outbox.assign("t", 2, bench.second.address)
        assert (await handed_off(fates)).epoch == 2
        await bench.outbox.close(shipment)


async def test_assignments_that_make_no_sense_are_refused_and_counted() -> None:
    async with benched(room=1) as bench:
        shipment = bench.open("t", 3)
        with pytest.raises(TransferError, match="t is under way already"):
            bench.open("t", 4)
        with pytest.raises(HandshakeRefused, match="not known"):
            bench.outbox.assign("u", 3, bench.first.address)
        with pytest.raises(HandshakeRefused, match="in epoch 2 already, not 2"):
            bench.outbox.assign("t", 2, bench.first.address)
        bench.outbox.assign("t", 3, bench.first.address)
        for epoch in (3, 2):
            with pytest.raises(HandshakeRefused, match=f"in epoch 3 already, not {epoch}"):
                bench.outbox.assign("t", epoch, bench.second.address)
        fates = shipment.fates()
        assert (await handed_off(fates)).epoch == 3
        other = bench.open("other")
        with pytest.raises(HandshakeRefused, match="the KV of transfer t is gone"):
            bench.outbox.assign("t", 5, bench.second.address)
        assert [fate async for fate in fates] == []
        assert bench.outbox.refused == {"unknown": 1, "stale": 3, "gone": 1}
        assert (bench.outbox.dropped, bench.outbox.resends, bench.held) == (1, 0, (1, 0))
        for one in (shipment, other):
            await bench.outbox.close(one)


async def test_kept_kv_makes_room_oldest_first_and_waiting_kv_never_does() -> None:
    async with benched(room=3) as bench:
        shipments = [bench.open(name, 0, bench.first.address) for name in "abc"]
        streams = [shipment.fates() for shipment in shipments]
        for stream in streams:
            await handed_off(stream)
        bench.outbox.assign("a", 1, bench.second.address)
        await handed_off(streams[0])
        assert bench.held == (0, 3)
        shipments += [bench.open("d"), bench.open("e")]
        assert [shipment.kv.gone for shipment in shipments[:3]] == [False, True, True], "a was kept again last"
        shipments.append(bench.open("f"))
        late = bench.outbox.open(PrefillJob(greedy("g", (5,), 4), "g", 0))
        assert not late.kv.claim_room()
        assert (bench.held, bench.outbox.dropped) == ((3, 0), 3)
        await bench.outbox.close(shipments.pop())
        assert late.kv.claim_room()
        for shipment in (*shipments, late):
            await bench.outbox.close(shipment)


@pytest.mark.parametrize("cause", ["never assigned", "failed"])
async def test_kv_that_nobody_asks_for_is_given_up_in_time(cause: str) -> None:
    async with benched(patience=replace(PATIENCE, unassigned_s=0.01)) as bench:
        shipment = bench.open("t", 0, "nowhere" if cause == "failed" else "")
        fates = shipment.fates()
        if cause == "failed":
            await failed(fates)
        with pytest.raises(DeadlineExceeded, match="no decode node was named for transfer t"):
            await anext(fates)
        assert bench.held == (0, 0)
        await bench.outbox.close(shipment)


async def test_kv_is_not_kept_for_ever_though_nobody_reads() -> None:
    async with benched(patience=replace(PATIENCE, kept_s=0.01)) as bench:
        shipment = bench.open("t", 0, bench.first.address)
        fates = shipment.fates()
        await handed_off(fates)
        assert [fate async for fate in fates] == []
        assert bench.held == (0, 0)
        await bench.outbox.close(shipment)


async def test_frames_that_come_after_the_end_are_not_held() -> None:
    """The engine's thread does not know of the end yet."""
    async with benched() as bench:
        shipment = bench.open("t", filled=1)
        await bench.outbox.close(shipment)
        shipment.kv.put(frames("t", 0)[1])
        shipment.finish(end("t", 0), finished_at=0.0)
        assert not shipment.kv.claim_room()
        assert bench.held == (0, 0)


@pytest.mark.parametrize("when", ["waiting", "kept"])
async def test_memory_that_coding_saves_is_given_back_as_frames_come(when: str) -> None:
    """The claim is for the worst case. Each frame tells its real size when it comes, and the rest is given back."""
    async with benched(room=1) as bench:
        address = bench.first.address if when == "kept" else ""
        shipment = bench.open("t", 0, address, filled=0)
        assert (bench.held_bytes, bench.left) == (KV_BYTES, 0)
        coded = frames("t", 0, Halving())
        for index, frame in enumerate(coded, 1):
            assert len(frame.payload) == FRAME_BYTES // 2
            shipment.kv.put(frame)
            assert bench.held_bytes == KV_BYTES - index * FRAME_BYTES // 2
        shipment.finish(end("t", 0), finished_at=0.0)
        if when == "kept":
            await handed_off(shipment.fates())
            assert bench.first.taken == [[*coded, end("t", 0)]]
        assert bench.held_bytes == FRAMES * FRAME_BYTES // 2
        assert bench.left == (KV_BYTES if when == "kept" else KV_BYTES // 2), "what ceased to wait made room"
        await bench.outbox.close(shipment)
        assert (bench.held_bytes, bench.left) == (0, KV_BYTES)
