"""NCCL's own ways to fail, which a library of our own plays: hangs, late errors, versions that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import Tensor

from hackkv.errors import ConfigError, DeadlineExceeded, FrameRefused, NodeLost
from tests.transport import fake_nccl, nouns
from tests.transport.ends import Reader, Source, listening, sending
from tests.transport.fake_nccl import Fault
from transport import nccl_link
from transport.link import Link
from transport.nccl_link import create, load_bindings

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
    if ending == "deadline":  # that of what hangs alone: on a busy machine the other one may be late too
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


@pytest.mark.parametrize("module", ["", "hack_kernels.triton.mix64"])
async def test_a_parcel_that_arrives_changed_is_refused_by_name_and_costs_the_others_nothing(module: str) -> None:
    """Summed up by C++ where it leaves, and by C++ or Triton where it arrives."""
    ranks = list[int]()
    kind = fake_nccl.kind(pytest.importorskip(module).mix64 if module else None)

    def counted(rank: int, host: str) -> Link:
        ranks.append(rank)
        return kind.open(rank, host)

    reader, counting = Reader(), replace(kind, open=counted)
    async with listening(counting, reader) as address, sending(counting) as sender:
        fake_nccl.library().fake_fault(Fault.TRANSFER_FLIPS)
        with pytest.raises(FrameRefused, match=r"^checksum of parcel 1 of pair 1, \d+ bytes over nccl$"):
            await sender.push(address, nouns.handoff(), nouns.frames(3))
        assert not reader.items
        assert (await sender.push(address, nouns.handoff("t-2"), nouns.frames(3, transfer_id="t-2"))).tokens == 4
    assert sorted(ranks) == [0, 1]


async def test_what_checks_parcels_has_run_before_one_is_sent() -> None:
    """Triton takes seconds to compile it, and a multiple of 16 bytes and another number are two kernels."""
    summed, kind = list[int](), fake_nccl.kind()

    def counting(buffer: Tensor, seed: int) -> int:
        summed.append(buffer.numel())
        return fake_nccl.in_cpp(buffer, seed)

    async with listening(fake_nccl.kind(counting), Reader()) as address, sending(kind) as sender:
        push = asyncio.create_task(sender.push(address, nouns.handoff(), (source := Source(before_block=0)).frames()))
        await source.blocked.wait()
        assert {size % 16 == 0 for size in summed} == {True, False}
        push.cancel()
        await asyncio.wait({push})


async def test_a_sender_that_sums_nothing_up_is_refused() -> None:
    kind = fake_nccl.kind()
    async with listening(kind, Reader()) as address, sending(replace(kind, checksum=None)) as sender:
        with pytest.raises(FrameRefused, match="parcel 1: checksum: None on a nccl link"):
            await sender.push(address, nouns.handoff(), nouns.frames(3))


def test_versions_that_do_not_fit_are_both_named() -> None:
    fake_nccl.library().fake_version(21704)
    with pytest.raises(ConfigError, match=r"wire: nccl: the library is 2\.17\.4, nccl4py is for \d+\.\d+\.\d+$"):
        load_bindings()


def test_a_machine_without_a_gpu_is_told_so_in_one_line() -> None:
    fake_nccl.library()
    with pytest.raises(ConfigError, match=r"^wire: nccl: torch sees no CUDA device[^\n]*$"):
        create()
