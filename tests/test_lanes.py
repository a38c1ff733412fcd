"""Copies beside the steps of a device give the same bytes as copies one after another, whichever lane lags."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hack_kernels.base import Planes, Pool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv import lanes as lanes_module
from hackkv.codecs import CODECS
from hackkv.errors import HackkvError
from hackkv.framing import FrameWriter
from hackkv.kv_memory import HostPages, KvMemory
from hackkv.lanes import ALIGNED, Departures, HostRing, Lanes, Leaving, Slot
from hackkv.types import KvFrame
from tests.decode_node import test_pressure, test_turns
from tests.lanes import CPU, SLOTS, Lagging, RubbishRing, on_lanes, streams
from tests.pair import PI, SHARING, TIMEOUT_S, greedy, paired, prompt, tiny_worker, twin
from tests.prefill_node import test_fetch, test_prefix

PAGES, PLACES, SLOT_COUNT = 7, 5, 3
ROWS = 3 * PI + 5


def tensors(pools: Sequence[Pool]) -> list[Tensor]:
    return [x for pool in pools for x in (*pool.planes.values(), pool.open_k, pool.open_v)]


def scribble(memory: KvMemory, page: int, slot: int, seed: int) -> None:
    """Change a page and a slot, as a step does."""
    generator = torch.Generator().manual_seed(100 * seed + page)
    for pool in memory.pools:
        for x in (*(plane[page] for plane in pool.planes.values()), pool.open_k[slot], pool.open_v[slot]):
            x.copy_(
                torch.randint(0, 256, (x.nbytes,), dtype=torch.uint8, generator=generator).view(x.dtype).view(x.shape)
            )


@dataclass
class Node:
    """Pools, host pages, and all parts that were sent."""

    memory: KvMemory
    host: HostPages = field(init=False)
    sent: list[list[tuple[int, Planes]]] = field(default_factory=list)
    """For each pass and layer: (first page, planes) of each part."""

    def __post_init__(self) -> None:
        self.host = HostPages(self.memory, PLACES)

    def compute(self, out: Departures, pages: list[int], slots: list[int], seed: int) -> None:
        """Change pages and ship them at once, as a pass does."""
        for page, slot in zip(pages, slots, strict=False):
            self.memory.lanes.compute.run(partial(scribble, self.memory, page, slot, seed))
        self.memory.lanes.written()
        for layer in range(len(self.memory.pools)):
            parts = list[tuple[int, Planes]]()
            self.sent.append(parts)
            out.send(self.memory.export(layer, pages), partial(_keep, parts))

    def swap(self, pages: list[int], slots: list[int], _: int) -> None:
        """Copy some pages and a slot to host memory, and from there to other pages and another slot."""
        kv = self.memory.copy_out(pages[:3], slots[0], ROWS)
        self.memory.copy_back(kv, pages[:2:-1], slots[1])

    def keep(self, pages: list[int], slots: list[int], _: int) -> None:
        """Save idle pages to host memory and load some of them into other pages."""
        self.host.save(pages[:3], [4, 0, 2])
        self.host.load([2, 4], pages[3:5])

    def install(self, pages: list[int], slots: list[int], _: int) -> None:
        """Parts that were sent arrive, in one frame for each KV head."""
        with self.memory.lanes.arriving():
            for layer, parts in enumerate(self.sent[-2:]):
                for (first, planes), head in product(parts, (1, 0)):
                    part = {name: plane[head : head + 1].clone() for name, plane in planes.items()}
                    count = next(iter(part.values())).shape[1]
                    self.memory.install(layer, range(head, head + 1), pages[first : first + count], part)
                    for plane in part.values():
                        plane.view(torch.uint8).fill_(0x77)

    def rows(self, pages: list[int], slots: list[int], _: int) -> None:
        """Copy a slot's rows to host memory. Then move the first slot to the second, and the first takes those rows."""
        exact = self.memory.export_rows(0, slots[2], ROWS).own()
        self.memory.copy_rows(slots[0], slots[1], ROWS)
        with self.memory.lanes.arriving():
            self.memory.install_rows(0, range(2), slots[0], self.memory.footprint.runs(ROWS), exact)


def _keep(parts: list[tuple[int, Planes]], part: Leaving, planes: Planes) -> None:
    parts.append((part.first, {name: plane.clone() for name, plane in planes.items()}))


OTHERS: dict[str, Callable[[Node, list[int], list[int], int], None]] = {
    "swap": Node.swap,
    "keep": Node.keep,
    "install": Node.install,
    "rows": Node.rows,
}
DAYS = st.lists(
    st.tuples(
        st.sampled_from(sorted(OTHERS)),
        st.permutations(range(PAGES)),
        st.permutations(range(SLOT_COUNT)),
        st.integers(1, 99),
    ),
    min_size=1,
    max_size=4,
)


def lived(node: Node, day: list[tuple[str, list[int], list[int], int]]) -> list[Tensor]:
    """Compute and copy by turns. Returns all bytes of the pools and of the sent parts in the end."""
    for other, pages, slots, seed in day:
        with node.memory.lanes.computing(), Departures(node.memory.lanes) as out:
            node.compute(out, pages, slots, seed)
        OTHERS[other](node, pages, slots, seed)
    node.memory.lanes.compute.mark().wait()
    sent = [torch.cat([planes[name] for _, planes in parts], 1) for parts in node.sent for name in parts[0][1]]
    return [*tensors(node.memory.pools), *sent]


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
@given(day=DAYS, seed=st.integers(0, 1 << 30))
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
def test_lanes_that_lag_change_no_byte(codec: str, day: list[tuple[str, list[int], list[int], int]], seed: int) -> None:
    """Every codec, in every order that lanes and marks allow and over torch's streams, equals immediate copies."""
    worker = tiny_worker(codec)
    kinds = [None, Lagging(seed, computes=True).lanes, streams()]
    ends = list[list[Tensor]]()
    for kind in kinds:
        if kind is None:
            ends.append(lived(Node(KvMemory(worker.codec, worker.layout, PAGES, SLOT_COUNT)), day))
            continue
        with on_lanes(kind) as made:
            ends.append(lived(Node(KvMemory(worker.codec, worker.layout, PAGES, SLOT_COUNT)), day))
        assert made[0].ring is not None
        assert made[0].ring.free == SLOTS, "every slot has come back"
    for end in ends[1:]:
        assert len(end) == len(ends[0])
        for one, other in zip(ends[0], end, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


Life = Callable[[str], Coroutine[Any, Any, None]]
LIVES: dict[str, Life] = {
    "swaps": test_pressure.test_a_node_under_pressure_says_the_same,
    "kept pages": test_turns.test_pages_come_back_from_host_memory_bit_equal,
    "kept prefixes": test_prefix.test_pages_go_to_host_memory_and_come_back_bit_equal,
    "fetches": test_fetch.test_a_fresh_prefill_node_goes_on_with_what_the_decode_node_kept,
}
"""Tests of nodes that elsewhere run with immediate copies."""
QUICK = "rot-k3v2"
"""One codec with exact pages."""


@pytest.mark.parametrize(
    "codec", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHARING]
)
@pytest.mark.parametrize("life", LIVES)
async def test_nodes_whose_lanes_lag_say_the_same(life: str, codec: str) -> None:
    """With prefill, wire, decode, swap, kept pages and lending, tokens are those of a process with immediate copies."""
    device = Lagging(len(life), computes=False)
    with on_lanes(device.lanes) as made:
        await LIVES[life](codec)
    assert device.waits > 0
    for each in made:
        assert each.ring is not None
        assert each.ring.free == SLOTS, "every slot has come back"


@pytest.mark.parametrize("lags", [False, True])
async def test_layers_leave_while_later_ones_compute(lags: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device copies, the host enqueues the next layer before it waits for the one before. Each layer is enough for
    a frame."""
    worker = replace(tiny_worker(), codec=twin(tiny_worker().codec))
    attend, frames, done = worker.codec.attend, FrameWriter.frames, list[tuple[str, int]]()

    def attending(layer: int, *rest: Any) -> Tensor:
        done.append(("attend", layer))
        return attend(layer, *rest)

    def cutting(writer: FrameWriter, layer: int, *rest: Any) -> Iterator[KvFrame]:
        done.append(("frames", layer))
        return frames(writer, layer, *rest)

    monkeypatch.setattr(worker.codec, "attend", attending)
    monkeypatch.setattr(FrameWriter, "frames", cutting)
    with on_lanes(Lagging(1, computes=False).lanes) if lags else nullcontext():
        async with paired(worker, frame_bytes=1) as nodes:
            await nodes.serve(greedy("r", prompt(1, PI), 2))
    at_once = [("attend", 0), ("frames", 0), ("attend", 1), ("frames", 1)]
    assert done[:4] == (sorted(at_once) if lags else at_once)


ONE = torch.zeros(1, dtype=torch.int64)


def lagging(seed: int = 1) -> tuple[Lagging, Lanes, RubbishRing]:
    """A device that lags, lanes on it, and their ring of small slots."""
    device = Lagging(seed, computes=True)
    ring = RubbishRing(SLOTS, 2 * ALIGNED, pinned=False)
    return device, Lanes(CPU, device.lanes, ring), ring


def test_a_thread_that_sends_goes_on_until_slots_run_short() -> None:
    """Two pages are sent without a wait. The third one waits for the first copy. The end of the block waits for all."""
    device, lanes, _ = lagging()
    pages, seen = torch.arange(12).view(6, 2), list[tuple[int, list[int]]]()

    def then(part: Leaving, planes: Planes) -> None:
        seen.append((part.first, planes["x"].flatten().tolist()))

    with Departures(lanes) as out:
        for number in range(6):
            out.send((lanes.fetch(ONE + at, lambda ids: {"x": pages[ids]}, at) for at in (number,)), then)
            assert len(seen) == device.waits == max(0, number + 1 - (SLOTS - 1))
    assert seen == [(number, [2 * number, 2 * number + 1]) for number in range(6)]


@pytest.mark.parametrize("where", ["block", "then"])
def test_what_a_failed_block_has_sent_is_over_and_not_used(where: str) -> None:
    """Its pages go to other holders then, and a repeated pass sends them again."""
    _, lanes, ring = lagging()
    page, used = torch.zeros(1, 2), list[Planes]()

    def then(_: Leaving, planes: Planes) -> None:
        if where == "then":
            raise ZeroDivisionError
        used.append(planes)

    def fail() -> None:
        with Departures(lanes) as out:
            out.send((lanes.fetch(ONE, lambda ids: {"x": page[ids]}) for _ in range(2)), then)
            if where == "block":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (used, ring.free, lanes.outflow.mark().done) == ([], SLOTS, True)


def test_what_a_failed_block_has_brought_is_written() -> None:
    """Thus no copy writes to pages that are given back."""
    _, lanes, ring = lagging()
    page = torch.zeros(2, 2)

    def write(ids: Tensor, planes: Planes) -> None:
        page[ids] = planes["x"]

    def fail() -> None:
        with lanes.arriving():
            lanes.bring(ONE + 1, {"x": torch.full((1, 2), 7.0)}, write)
            assert page.sum() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (page.tolist(), ring.free) == ([[0, 0], [7, 7]], SLOTS)


WAYS: dict[str, Callable[[Lanes, Planes], object]] = {
    "fetch": lambda lanes, large: lanes.fetch(ONE, lambda ids: large),
    "bring": lambda lanes, large: lanes.bring(ONE, large, lambda ids, planes: None),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_a_slot_is_refused_and_gives_the_slot_back(way: str) -> None:
    ring = HostRing(1, 2 * ALIGNED, pinned=False)
    with pytest.raises(ValueError, match="768 bytes do not fit into a slot of 512"):
        WAYS[way](Lanes(CPU, streams(), ring), {"x": torch.zeros(2 * ALIGNED, dtype=torch.uint8)})
    assert ring.free == 1


@given(
    count=st.integers(0, 40), sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5), spare=st.integers(0, 9000)
)
def test_parts_fit_their_slots_and_make_up_the_whole(count: int, sizes: list[int], spare: int) -> None:
    ring = HostRing(1, sum(sizes) + 8 + ALIGNED * (len(sizes) + 1) + spare, pinned=False)
    parts = list(Lanes(CPU, ring=ring).pieces(count, sizes))
    assert [at for part in parts for at in part] == list(range(count))
    for part in parts:
        slot = ring.take()
        planes = {str(i): torch.zeros(len(part) * size, dtype=torch.uint8) for i, size in enumerate(sizes)}
        slot.put({"": torch.zeros(len(part), dtype=torch.int64), **planes})
        ring.give_back(slot)
    assert len(list(Lanes(CPU).pieces(count, sizes))) == min(count, 1)


def test_a_slot_that_does_not_come_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that does come back ends the wait of a thread."""
    ring = HostRing(1, 8, pinned=False)
    taken, found = ring.take(), list[Slot]()
    thread = threading.Thread(target=lambda: found.append(ring.take()))
    thread.start()
    ring.give_back(taken)
    thread.join(TIMEOUT_S)
    assert found == [taken]
    monkeypatch.setattr(lanes_module, "SLOT_S", 0)
    with pytest.raises(HackkvError, match="none of 1 slots of host memory came back within 0 s"):
        ring.take()
