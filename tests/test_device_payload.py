"""Payloads on a device give the same planes as bytes do, on that device, and damage gives the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hackkv import kv_memory
from hackkv.codecs import CODECS
from hackkv.device_payload import DevicePayload
from hackkv.errors import FrameRefused
from hackkv.framing import CheckedFrame
from hackkv.kv_memory import KvMemory
from hackkv.lanes import ALIGNED, Lanes
from hackkv.model.generate import generate
from hackkv.types import KvFrame
from hackkv.wire_form import wire_form
from tests.handoffs import FORMS, Shipment, same_bytes, ship
from tests.lanes import SLOTS, Lagging, RubbishRing, on_lanes
from tests.pair import PI, greedy, paired, prompt, tiny_worker
from tests.transport import fake_nccl
from transport.wires import linked

Xxh3 = Callable[[Sequence[Tensor], int], list[int]]


class Resident(DevicePayload):
    """A payload that fails the test if its bytes go to host memory."""

    def __bytes__(self) -> bytes:
        raise AssertionError("a payload goes to host memory")


def on_device(frame: KvFrame, xxh3_64: Xxh3 = fake_nccl.on_host) -> KvFrame:
    """The frame with its payload on a device. Only a coded payload may be copied to host memory."""
    kind = DevicePayload if any(span.method for span in frame.planes) else Resident
    return replace(frame, payload=kind(torch.frombuffer(bytearray(bytes(frame.payload)), dtype=torch.uint8), xxh3_64))


def accepted_alike(shipment: Shipment, xxh3_64: Xxh3) -> None:
    here, there = shipment.ledger(), shipment.ledger()
    for frame in shipment.frames:
        for planes, others in zip(here.accept(frame), there.accept(on_device(frame, xxh3_64)), strict=True):
            for name, plane in others.items():
                assert same_bytes(plane, planes[name]), name
    there.finish(shipment.end)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_planes_on_a_device_are_those_in_host_memory(codec: str, form: str) -> None:
    """Coded planes are decoded in host memory. No byte of other planes goes there."""
    accepted_alike(ship(codec, form=wire_form(form), tokens=150), fake_nccl.on_host)


def test_triton_checks_frames_where_they_have_arrived() -> None:
    accepted_alike(ship("rot-k3v2", tokens=70), pytest.importorskip("hack_kernels.triton.xxh3").xxh3_64)


@pytest.mark.parametrize("codec", ["rot-k3v2", "hack"])
def test_damage_on_a_device_is_refused_in_the_same_words(codec: str) -> None:
    shipment = ship(codec, tokens=70)
    frame = shipment.frames[0]
    for span_end in range(len(frame.planes)):
        at = sum(span.coded_bytes for span in frame.planes[: span_end + 1]) - 1
        rotten = bytearray(bytes(frame.payload))
        rotten[at] ^= 1
        words = list[str]()
        for payload in (bytes(rotten), fake_nccl.in_memory(torch.frombuffer(rotten, dtype=torch.uint8))):
            with pytest.raises(FrameRefused) as caught:
                shipment.ledger().accept(replace(frame, payload=payload))
            words.append(f"{caught.value.reason}: {caught.value}")
        assert words == [f"corrupt: checksum of plane {frame.planes[span_end].name}, layer 0, frame 0"] * 2


@contextmanager
def narrow_ring(seed: int) -> Iterator[list[RubbishRing]]:
    """Lanes that lag for every memory that is made, with ring slots too small for any page."""
    device, rings = Lagging(seed, computes=False), list[RubbishRing]()

    def lanes_on(on: torch.device, most_bytes: int) -> Lanes:
        rings.append(RubbishRing(SLOTS, ALIGNED, pinned=False))
        return Lanes(on, device.lanes, rings[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_memory, "lanes_on", lanes_on)
        yield rings


@pytest.mark.parametrize("codec", ["rot-k3v2", "hack", "fp16"])
def test_what_lies_on_a_device_is_written_to_pages_from_there(codec: str) -> None:
    """The write uses no slot of the ring, and happens in the turn of the lane for arrivals."""
    worker = tiny_worker(codec)
    shipment = ship(
        codec, tokens=2 * PI + 5, layers=worker.layout.num_layers, heads=worker.layout.num_kv_heads, together=2
    )
    pages, ends = (3, 1, 2), list[list[Tensor]]()
    for resident in (False, True):
        if resident:
            with narrow_ring(5):
                memory = KvMemory(worker.codec, worker.layout, 4, 2)
        else:
            memory = KvMemory(worker.codec, worker.layout, 4, 2)
        expected = shipment.expected()
        runs = memory.footprint.runs(shipment.num_tokens)
        for frame in shipment.frames:
            planes = tuple(expected.planes(layer, frame.rows) for layer in frame.layers)
            checked = CheckedFrame(on_device(frame) if resident else frame, planes, expected.form)
            with memory.lanes.arriving():
                memory.install_frame(checked.frame, checked.open(), pages, 1, runs)
        ends.append([x for pool in memory.pools for x in (*pool.planes.values(), pool.open_k, pool.open_v)])
    for one, other in zip(*ends, strict=True):
        assert same_bytes(one, other)


@pytest.mark.skipif(not fake_nccl.possible(), reason="nccl4py, a C compiler and a torch without CUDA")
@pytest.mark.parametrize("codec", ["rot-k3v2", "hack", "fp16"])
async def test_a_handoff_over_nccl_lands_without_a_trip_through_host_memory(codec: str) -> None:
    """Both nodes have lanes that lag. Tokens are those of one process, and no code asks for a parcel's bytes."""
    kind = fake_nccl.kind(make_payload=lambda buffer: Resident(buffer, fake_nccl.on_host))
    worker, request = tiny_worker(codec), greedy("r", prompt(3, 4 * PI + 7), 6)
    due = [token.token_id for token in generate(worker, request)]
    with on_lanes(Lagging(7, computes=False).lanes):
        async with paired(worker, over=linked(lambda _: kind)) as nodes:
            served = await nodes.serve(request)
            assert [token.token_id for token in served.tokens] == due
            await nodes.assert_idle()
