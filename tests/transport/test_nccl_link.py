"""Failures of NCCL, played by a library of our own: hangs, late errors, versions that do not fit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch import Tensor

from hackkv.device_payload import DevicePayload
from hackkv.errors import ConfigError, DeadlineExceeded, FrameRefused, NodeLost
from hackkv.types import Handoff, HandoffEnd, Receipt
from tests.handoffs import ship
from tests.transport import fake_nccl, nouns
from tests.transport.ends import Frames, Reader, Source, Table, listening, sending
from tests.transport.fake_nccl import Fault
from transport import nccl_link
from transport.link import Link, on_host
from transport.nccl_link import NcclLink, create, load_bindings

pytestmark = pytest.mark.skipif(not fake_nccl.possible(), reason="nccl4py, a C compiler and a torch without CUDA")


@pytest.fixture(autouse=True)
def _sound_again() -> Iterator[None]:
    yield
    fake_nccl.library().fake_fault(0)
    fake_nccl.library().fake_version(23203)


@pytest.mark.parametrize("fault", [Fault.INIT_FAILS, Fault.TRANSFER_FAILS, Fault.SEND_REFUSED])
async def test_an_error_of_nccl_is_a_lost_node_and_the_next_push_is_sound(fault: Fault) -> None:
    kind = fake_nccl.kind()
    async with listening(kind, Reader()) as address, sending(kind) as sender:
        fake_nccl.library().fake_fault(fault)
        with pytest.raises(NodeLost):
            await sender.push(address, nouns.handoff(), nouns.frames(3))
        assert (await sender.push(address, nouns.handoff("t-2"), nouns.frames(3, transfer_id="t-2"))).tokens >= 4


@pytest.mark.parametrize("fault", [Fault.INIT_HANGS, Fault.TRANSFER_HANGS])
@pytest.mark.parametrize("ending", ["deadline", "sender", "push"])
async def test_a_hang_ends_with_its_deadline_with_the_sender_or_with_the_push(
    fault: Fault, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == "deadline":  # only of the step that hangs: on a busy machine the other one may be late too
        late = "CONNECT_TIMEOUT_S" if fault is Fault.INIT_HANGS else "PARCEL_TIMEOUT_S"
        monkeypatch.setattr(nccl_link, late, 0.05)
    kind, reader = fake_nccl.kind(), Reader()
    async with listening(kind, reader) as address, sending(kind) as sender:
        fake_nccl.library().fake_fault(fault)
        push = asyncio.create_task(sender.push(address, nouns.handoff(), Source().frames()))
        if fault is Fault.TRANSFER_HANGS:
            await reader.started.wait()
        if ending == "sender":
            await sender.close()
        elif ending == "push":
            push.cancel()
        with pytest.raises(asyncio.CancelledError if ending == "push" else (NodeLost, DeadlineExceeded)):
            await push


def test_a_parcel_that_is_done_as_the_link_is_aborted_has_arrived() -> None:
    class Aborting(fake_nccl.HostMemory):
        def mark(self) -> Callable[[], bool]:
            done = super().mark()

            def aborted() -> bool:
                if not done():
                    return False
                receiver.abort()
                for each in [each for each in threading.enumerate() if each.name == "abort"]:
                    each.join()
                return True

            return aborted

    fake_nccl.library()
    bindings, table = load_bindings(), Table()
    sender = NcclLink(bindings, fake_nccl.HostMemory(fake_nccl.in_memory), 0)
    receiver = NcclLink(bindings, Aborting(fake_nccl.in_memory), 1)
    with ThreadPoolExecutor(1) as thread:
        meeting = thread.submit(receiver.connect, table)
        sender.connect(table)
        meeting.result()
        arriving = thread.submit(receiver.post(3))
        sender.send(b"abc")
        assert bytes(arriving.result()) == b"abc"
    sender.abort()


@pytest.mark.parametrize("module", ["", "hack_kernels.triton.xxh3"])
async def test_a_parcel_that_arrives_changed_is_refused_by_its_plane_and_costs_the_pair_nothing(module: str) -> None:
    """The parcel is checked on the host, or by Triton on the device where it has arrived."""
    xxh3_64 = pytest.importorskip(module).xxh3_64 if module else fake_nccl.on_host
    shipment, ranks = ship("rot-k3v2", tokens=70), list[int]()
    kind = fake_nccl.kind(lambda buffer: DevicePayload(buffer, xxh3_64))
    handoff = Handoff("t-1", 4, nouns.FINGERPRINT, shipment.num_tokens)

    def counted(rank: int, host: str) -> Link:
        ranks.append(rank)
        return kind.open(rank, host)

    async def check(_: Handoff, frames: Frames) -> Receipt:
        ledger = shipment.ledger()
        async for item in frames:
            if isinstance(item, HandoffEnd):
                ledger.finish(item)
            else:
                ledger.accept(item)
        return nouns.receipt("t-1", shipment.num_tokens)

    async def written() -> Frames:
        for frame in shipment.frames:
            yield frame
        yield shipment.end

    counting = replace(kind, open=counted)
    async with listening(counting, check) as address, sending(counting) as sender:
        fake_nccl.library().fake_fault(Fault.TRANSFER_FLIPS)
        with pytest.raises(FrameRefused, match=r"^checksum of plane [a-z._]+, layer 0, frame 0$"):
            await sender.push(address, handoff, written())
        assert (await sender.push(address, handoff, written())).tokens == shipment.num_tokens
    assert sorted(ranks) == [0, 1]


async def test_what_checks_parcels_has_run_before_one_is_sent() -> None:
    """Triton takes seconds to compile the check."""
    checked, kind = list[int](), fake_nccl.kind()

    def counting(pieces: Sequence[Tensor], seed: int) -> list[int]:
        checked.extend(piece.numel() for piece in pieces)
        return fake_nccl.on_host(pieces, seed)

    receiving = fake_nccl.kind(lambda buffer: DevicePayload(buffer, counting))
    async with listening(receiving, Reader()) as address, sending(kind) as sender:
        push = asyncio.create_task(sender.push(address, nouns.handoff(), (source := Source(before_block=0)).frames()))
        await source.blocked.wait()
        assert checked
        push.cancel()
        await asyncio.wait({push})


def test_versions_that_do_not_fit_are_both_named() -> None:
    fake_nccl.library().fake_version(21704)
    with pytest.raises(ConfigError, match=r"wire: nccl: the library is 2\.17\.4, nccl4py is for \d+\.\d+\.\d+$"):
        load_bindings()


def test_a_machine_without_a_gpu_is_told_so_in_one_line() -> None:
    fake_nccl.library()
    with pytest.raises(ConfigError, match=r"^wire: nccl: torch sees no CUDA device[^\n]*$"):
        create(on_host)
