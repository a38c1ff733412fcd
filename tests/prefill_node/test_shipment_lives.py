"""Shipments in every order of events: only live shipments hold bytes, and every fate is told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hackkv.errors import HandshakeRefused
from hackkv.types import HandedOff, HandoffFailed, PrefillJob
from prefill_node.shipment import Shipment
from tests.pair import greedy
from tests.prefill_node.shipping import FRAMES, PATIENCE, Bench, end, frames


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
        bench = Bench(self.ROOM, PATIENCE)
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
        """A job comes, with or without a decode node."""
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
        """The prompt of a shipment runs on if there is room for its KV."""
        name = self.any_name(data)
        shipment = self.alive[name]
        before = sum(self.bench.held)
        started = bool(self.filled[name])
        if not shipment.kv.claim_room():
            assert shipment.kv.gone or (not started and self.bench.held[0] == self.ROOM)
            return
        assert not started or sum(self.bench.held) == before, "what has started has its room"

        def computing() -> None:
            for _ in range(count):
                if self.filled[name] < FRAMES:
                    shipment.kv.put(frames(name, 0)[self.filled[name]])
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
            if step == 0 or self.alive[name].kv.gone:
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
        """A shipment holds all its KV from the prompt's start until it is gone, and the total stays within the room."""
        holding = [name for name, one in self.alive.items() if self.filled[name] and not one.kv.gone]
        assert sum(self.bench.held) == len(holding) <= self.ROOM

    @invariant()
    def fates_are_told_once_and_in_order(self) -> None:
        """Success is told of complete KV only."""
        for name, fates in self.fates.items():
            epochs = [fate.epoch for fate in fates]
            assert epochs == sorted(set(epochs))
            assert all(epoch <= self.goal[name][0] for epoch in epochs)
            assert self.filled[name] > FRAMES or not any(isinstance(fate, HandedOff) for fate in fates)

    def teardown(self) -> None:
        """Once nothing stalls, every complete KV is at the node to which it was last assigned. Then all ends."""
        for node in (self.bench.first, self.bench.second):
            self.act(node.gate.set, turns=100)
        for name, shipment in self.alive.items():
            epoch, address = self.goal[name]
            if not shipment.kv.gone and epoch >= 0 and self.filled[name] > FRAMES:
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
TestLives.settings = settings(max_examples=40, stateful_step_count=25)
