"""KV stays until its request ends and can be sent again; whatever happens, bytes are counted and every state ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hackkv.errors import DeadlineExceeded, FrameRefused, HandshakeRefused, TransferError
from hackkv.framing import FrameWriter
from hackkv.types import Fingerprint, HandedOff, Handoff, HandoffEnd, HandoffFailed, KvFrame, PrefillJob, Receipt
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.outbox import Outbox
from prefill_node.shipment import DEFAULT_PATIENCE, Patience, Shipment
from tests.pair import TIMEOUT_S, greedy
from transport.base import KvListener
from transport.wires import WIRES

FRAMES, FRAME_BYTES = 3, 64
KV_BYTES = FRAMES * FRAME_BYTES
TOKEN = 9


def frames(name: str, epoch: int) -> list[KvFrame]:
    """What an engine would write: a page of one plane for each of three layers."""
    writer = FrameWriter(name, epoch)
    pages = [torch.full((1, 1, FRAME_BYTES), layer, dtype=torch.uint8) for layer in range(FRAMES)]
    return [next(writer.frames(layer, 0, {"k": page})) for layer, page in enumerate(pages)]


def end(name: str, epoch: int) -> HandoffEnd:
    writer = FrameWriter(name, epoch)
    for layer in range(FRAMES):
        next(writer.frames(layer, 0, {"k": torch.zeros((1, 1, 1))}))
    return writer.end(TOKEN)


@dataclass(eq=False)
class Receiver:
    """A decode node that takes every handoff, and holds on where a test closes the gate."""

    listener: KvListener
    address: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a frame has arrived."""
    taken: list[list[KvFrame | HandoffEnd]] = field(default_factory=list)
    error: Exception | None = None

    async def deliver(self, handoff: Handoff, items: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Take a handoff."""
        taken = []
        async for item in items:
            taken.append(item)
            self.reached.set()
            await self.gate.wait()
        if self.error:
            raise self.error
        self.taken.append(taken)
        return Receipt(handoff.transfer_id, handoff.num_tokens, (), 0, 0, 0.0)


class Bench:
    """An outbox with host memory for `room` requests, and two decode nodes."""

    def __init__(self, room: int, patience: Patience) -> None:
        wire = WIRES["inproc"](TIMEOUT_S)
        self.pool = HostPool(room * KV_BYTES, lambda _: None)
        self.sender = wire.sender()
        self.outbox = Outbox(self.sender, Fingerprint(()), self.pool, patience, lambda _: KV_BYTES)
        self.first, self.second = (Receiver(wire.listener()) for _ in range(2))

    async def start(self) -> None:
        """Open both gates and listen."""
        for node in (self.first, self.second):
            node.address = await node.listener.serve(node.deliver)
            node.gate.set()

    def open(self, name: str, epoch: int = 0, address: str = "", *, filled: int = FRAMES) -> Shipment:
        """A shipment with room, its first frames, and, if all are there, its end."""
        shipment = self.outbox.open(PrefillJob(greedy(name, (5, 6, 7), 4), name, epoch, address))
        assert shipment.claim_room()
        for frame in frames(name, epoch)[:filled]:
            shipment.put(frame)
        if filled == FRAMES:
            shipment.finish(end(name, epoch), finished_at=0.0)
        return shipment

    @property
    def held(self) -> tuple[int, int]:
        """Requests' worth of bytes that wait and that are kept."""
        waiting, kept = (self.pool.bytes_of(tenant) // KV_BYTES for tenant in (Tenant.WAITING, Tenant.KEPT))
        return waiting, kept


@asynccontextmanager
async def benched(room: int = 2, patience: Patience = DEFAULT_PATIENCE) -> AsyncIterator[Bench]:
    bench = Bench(room, patience)
    await bench.start()
    yield bench
    await bench.sender.close()
    for node in (bench.first, bench.second):
        await node.listener.close()


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
    """While the prompt still runs: one frame has left, the others come after the new assignment."""
    async with benched() as bench:
        bench.first.gate.clear()
        shipment = bench.open("t", 0, bench.first.address, filled=1)
        await bench.first.reached.wait()
        bench.outbox.assign("t", 1, bench.second.address)
        await bench.second.reached.wait()
        for frame in frames("t", 0)[1:]:
            shipment.put(frame)
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
        assert [shipment.is_gone for shipment in shipments[:3]] == [False, True, True], "a was kept again last"
        shipments.append(bench.open("f"))
        late = bench.outbox.open(PrefillJob(greedy("g", (5,), 4), "g", 0))
        assert not late.claim_room()
        assert (bench.held, bench.outbox.dropped) == ((3, 0), 3)
        await bench.outbox.close(shipments.pop())
        assert late.claim_room()
        for shipment in (*shipments, late):
            await bench.outbox.close(shipment)


@pytest.mark.parametrize("cause", ["never assigned", "failed"])
async def test_kv_that_nobody_asks_for_is_given_up_in_time(cause: str) -> None:
    async with benched(patience=Patience(unassigned_s=0.01)) as bench:
        shipment = bench.open("t", 0, "nowhere" if cause == "failed" else "")
        fates = shipment.fates()
        if cause == "failed":
            await failed(fates)
        with pytest.raises(DeadlineExceeded, match="no decode node was named for transfer t"):
            await anext(fates)
        assert bench.held == (0, 0)
        await bench.outbox.close(shipment)


async def test_kv_is_not_kept_for_ever_though_nobody_reads() -> None:
    async with benched(patience=Patience(kept_s=0.01)) as bench:
        shipment = bench.open("t", 0, bench.first.address)
        fates = shipment.fates()
        await handed_off(fates)
        assert [fate async for fate in fates] == []
        assert bench.held == (0, 0)
        await bench.outbox.close(shipment)


async def test_frames_that_come_after_the_end_are_not_held() -> None:
    """The engine's thread does not know yet."""
    async with benched() as bench:
        shipment = bench.open("t", filled=1)
        await bench.outbox.close(shipment)
        shipment.put(frames("t", 0)[1])
        shipment.finish(end("t", 0), finished_at=0.0)
        assert not shipment.claim_room()
        assert bench.held == (0, 0)


class Lives(RuleBasedStateMachine):
    """Shipments in every order of events, over the in-process wire, with decode nodes that stall."""

    ROOM = 3

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.bench = self.runner.run(self.begin())
        self.alive: dict[str, Shipment] = {}
        self.filled: dict[str, int] = {}
        self.goal: dict[str, tuple[int, str]] = {}
        """Epoch and address of the last assignment."""
        self.fates: dict[str, list[HandedOff | HandoffFailed]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.count = 0

    async def begin(self) -> Bench:
        bench = Bench(self.ROOM, DEFAULT_PATIENCE)
        await bench.start()
        return bench

    def act(self, action: Callable[[], object], turns: int = 3) -> None:
        """Do something on the loop, then let it turn a few times."""

        async def acting() -> None:
            action()
            for _ in range(turns):
                await asyncio.sleep(0)

        self.runner.run(acting())

    async def read(self, name: str, shipment: Shipment) -> None:
        async for fate in shipment.fates():
            self.fates[name].append(fate)

    def any_name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.alive)))

    @rule(assigned=st.booleans())
    def open(self, assigned: bool) -> None:
        """A job comes, with a decode node or without."""
        self.count += 1
        name, address = f"t{self.count}", self.bench.first.address if assigned else ""

        def opening() -> None:
            shipment = self.bench.outbox.open(PrefillJob(greedy(name, (5, 6, 7), 4), name, 0, address))
            self.alive[name], self.filled[name], self.fates[name] = shipment, 0, []
            self.goal[name] = (0, address) if address else (-1, "")
            self.tasks.append(asyncio.create_task(self.read(name, shipment)))

        self.act(opening)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), count=st.integers(1, FRAMES + 1))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Its prompt runs on, if there is room for it."""
        name = self.any_name(data)
        shipment = self.alive[name]
        before = sum(self.bench.held)
        started = bool(self.filled[name])
        if not shipment.claim_room():
            assert shipment.is_gone or (not started and self.bench.held[0] == self.ROOM)
            return
        assert not started or sum(self.bench.held) == before, "what has started has its room"

        def computing() -> None:
            for _ in range(count):
                if self.filled[name] < FRAMES:
                    shipment.put(frames(name, 0)[self.filled[name]])
                elif self.filled[name] == FRAMES:
                    shipment.finish(end(name, 0), finished_at=0.0)
                self.filled[name] += 1

        self.act(computing)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), step=st.integers(0, 3), to=st.sampled_from(["first", "second", "nowhere"]))
    def assign(self, data: st.DataObject, step: int, to: str) -> None:
        """A decode node is named, perhaps in an epoch that is over."""
        name = self.any_name(data)
        epoch = self.goal[name][0] + step
        address = to if to == "nowhere" else getattr(self.bench, to).address

        def assigning() -> None:
            if step == 0 or self.alive[name].is_gone:
                with pytest.raises(HandshakeRefused):
                    self.bench.outbox.assign(name, epoch, address)
            else:
                self.bench.outbox.assign(name, epoch, address)
                self.goal[name] = (epoch, address)

        self.act(assigning)

    @rule(node=st.sampled_from(["first", "second"]), is_open=st.booleans(), turns=st.integers(0, 30))
    def stall(self, node: str, is_open: bool, turns: int) -> None:
        """A decode node stalls, or goes on."""
        gate = getattr(self.bench, node).gate
        self.act(gate.set if is_open else gate.clear, turns)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """The request is over."""
        shipment = self.alive.pop(self.any_name(data))
        self.act(lambda: self.tasks.append(asyncio.create_task(self.bench.outbox.close(shipment))))

    @invariant()
    def bytes_are_those_of_the_living(self) -> None:
        """All of its KV from a prompt's start until it is gone, and never more than there is room for."""
        holding = [name for name, one in self.alive.items() if self.filled[name] and not one.is_gone]
        assert sum(self.bench.held) == len(holding) <= self.ROOM

    @invariant()
    def fates_are_told_once_and_in_order(self) -> None:
        """And success only of what is complete."""
        for name, fates in self.fates.items():
            epochs = [fate.epoch for fate in fates]
            assert epochs == sorted(set(epochs))
            assert all(epoch <= self.goal[name][0] for epoch in epochs)
            assert self.filled[name] > FRAMES or not any(isinstance(fate, HandedOff) for fate in fates)

    def teardown(self) -> None:
        """When nothing stalls any more, every complete KV is where it was last assigned to; then all ends."""
        for node in (self.bench.first, self.bench.second):
            self.act(node.gate.set, turns=100)
        for name, shipment in self.alive.items():
            epoch, address = self.goal[name]
            if not shipment.is_gone and epoch >= 0 and self.filled[name] > FRAMES:
                fate = self.fates[name][-1]
                assert fate.epoch == epoch
                assert isinstance(fate, HandoffFailed if address == "nowhere" else HandedOff)
        self.runner.run(self.end())
        assert self.bench.held == (0, 0)
        self.runner.close()

    async def end(self) -> None:
        for shipment in self.alive.values():
            await self.bench.outbox.close(shipment)
        await asyncio.gather(*self.tasks)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
