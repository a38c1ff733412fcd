"""Frames land beside the loop, and never in pages that were given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from hack_kernels.base import Planes, Pool
from torch import Tensor

from decode_node import landing
from decode_node.landing import LandingGrant, LandingStrip
from hackkv.errors import FrameRefused, TransferError
from hackkv.expected import Expected
from hackkv.framing import CheckedFrame
from hackkv.ledger import FrameLedger
from hackkv.model.runner import ModelRunner
from hackkv.types import KvFrame
from hackkv.wire_form import RAW, Bytes, WireForm
from tests.decode_node.receiving import GRANT, TOKENS, planned
from tests.pair import TIMEOUT_S, tiny_worker


class Gate:
    """A gate at which a thread waits until a test opens it."""

    def __init__(self) -> None:
        self._arrived, self._go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Wait at the gate (for the thread)."""
        self._arrived.set()
        assert self._go_on.wait(TIMEOUT_S)

    async def reached(self) -> None:
        """Wait until the thread is at the gate (for the test)."""
        assert await asyncio.to_thread(self._arrived.wait, TIMEOUT_S)

    def open(self) -> None:
        """Let the thread go on."""
        self._go_on.set()


class GatedForm:
    """A wire form whose decoder waits at a gate."""

    name, method = "gated", 200

    def __init__(self) -> None:
        self.gate = Gate()

    def cap(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        return plane.tobytes()

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        self.gate.stop()
        RAW.decode(coded, plane, itemsize)


class Node:
    """The pools of a decode node, their landing strip, and frames of sealed pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: WireForm = RAW) -> None:
        monkeypatch.setattr(landing, "AT_ONCE_BYTES", 0)
        worker = tiny_worker("fp16")
        self.runner = ModelRunner(worker.model, worker.codec, 9, 3)
        self.strip = LandingStrip(self.runner.memory)
        self.grant = LandingGrant(GRANT, TOKENS)
        frames = [item for item in planned(worker, form=form) if isinstance(item, KvFrame)]
        ledger = FrameLedger("t", 2, Expected(worker.layout, worker.codec.wire_planes, TOKENS, worker.footprint, form))
        self.frames = [ledger.check(frame) for frame in frames]

    def bytes(self) -> list[Tensor]:
        """A copy of everything that the pools hold."""
        return [plane.clone().view(torch.uint8) for pool in self.runner.memory.pools for plane in pool.planes.values()]

    def land(self, frame: CheckedFrame) -> asyncio.Task[float]:
        """Begin to land a frame."""
        return asyncio.create_task(self.strip.land(self.grant, frame))


async def test_the_loop_goes_on_while_a_frame_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    form = GatedForm()
    node = Node(monkeypatch, form)
    before, landed = node.bytes(), node.land(node.frames[0])
    await form.gate.reached()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not landed.done()
    form.gate.open()
    assert await landed > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, node.bytes(), strict=True))
    node.strip.close()


async def test_closing_waits_for_no_decoder_and_nothing_is_written_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of the frame runs on. Its pages may have a new holder, so the write finds the grant closed."""
    form = GatedForm()
    node = Node(monkeypatch, form)
    before, landed = node.bytes(), node.land(node.frames[0])
    await form.gate.reached()
    node.grant.close()
    assert not landed.done()
    form.gate.open()
    with pytest.raises(TransferError, match="transfer t was cancelled at the decode node"):
        await landed
    assert all(torch.equal(old, new) for old, new in zip(before, node.bytes(), strict=True))
    node.strip.close()


async def test_closing_waits_for_a_write_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are given back after `close` returns: by then the write is over, and no other begins."""
    node, gate = Node(monkeypatch), Gate()
    install = node.runner.codec.from_wire

    def slow(layer: int, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        gate.stop()
        install(layer, pool, page_ids, planes)

    monkeypatch.setattr(node.runner.codec, "from_wire", slow)
    before = node.bytes()
    landed = node.land(node.frames[0])
    await gate.reached()
    closing = asyncio.create_task(asyncio.to_thread(node.grant.close))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not closing.done()
    assert all(torch.equal(old, new) for old, new in zip(before, node.bytes(), strict=True))
    landed.cancel()  # this ends the wait for the frame, but not the write
    gate.open()
    await closing
    written = node.bytes()
    assert any(not torch.equal(old, new) for old, new in zip(before, written, strict=True))
    with pytest.raises(TransferError):
        await node.land(node.frames[1])
    assert all(torch.equal(old, new) for old, new in zip(written, node.bytes(), strict=True))
    node.strip.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_damage_writes_nothing(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    node = Node(monkeypatch)
    if at_once:
        monkeypatch.setattr(landing, "AT_ONCE_BYTES", 1 << 30)
    before, frame = node.bytes(), node.frames[0].frame
    damaged = bytearray(bytes(frame.payload))
    damaged[-1] ^= 1
    object.__setattr__(frame, "payload", bytes(damaged))
    with pytest.raises(FrameRefused, match="checksum of plane v"):
        await node.land(node.frames[0])
    assert all(torch.equal(old, new) for old, new in zip(before, node.bytes(), strict=True))
    node.strip.close()
