"""Copies beside the steps of a device give the bytes that copies one after another give, whatever lags."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import pytest
import torch
from hack_kernels.base import Planes, Pool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv import lanes
from hackkv.codecs import CODECS
from hackkv.errors import HackkvError
from hackkv.kv_memory import HostPages, KvMemory
from hackkv.lanes import Departures, HostRing, Lanes, Leaving, Mark
from tests.decode_node import test_pressure, test_turns
from tests.lanes import CPU, SLOTS, Lagging, on_lanes, streams
from tests.pair import PI, TIMEOUT_S, tiny_worker
from tests.prefill_node import test_fetch, test_prefix

PAGES, PLACES, SLOT_COUNT = 7, 5, 3
ROWS = 3 * PI + 5


def tensors(pools: Sequence[Pool]) -> list[Tensor]:
    return [x for pool in pools for x in (*pool.planes.values(), pool.open_k, pool.open_v)]


def scribble(memory: KvMemory, page: int, slot: int, seed: int) -> None:
    """What a step does to a page and to a slot, as far as a copy can see it."""
    generator = torch.Generator().manual_seed(seed)
    for pool in memory.pools:
        for x in (*(plane[page] for plane in pool.planes.values()), pool.open_k[slot], pool.open_v[slot]):
            x.copy_(
                torch.randint(0, 256, (x.nbytes,), dtype=torch.uint8, generator=generator).view(x.dtype).view(x.shape)
            )


@dataclass
class Node:
    """Pools, host pages, and everything that left."""

    memory: KvMemory
    host: HostPages = field(init=False)
    sent: list[list[tuple[int, Planes]]] = field(default_factory=list)
    """By pass and layer: first page of a part, planes."""

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
        """Some pages and a slot to host memory, and to others."""
        kv = self.memory.copy_out(pages[:3], slots[0], ROWS)
        self.memory.copy_back(kv, pages[:2:-1], slots[1])

    def keep(self, pages: list[int], slots: list[int], _: int) -> None:
        """Pages that nobody holds come back elsewhere."""
        self.host.save(pages[:3], [4, 0, 2])
        self.host.load([2, 4], pages[3:5])

    def install(self, pages: list[int], slots: list[int], _: int) -> None:
        """What left arrives, one frame for each KV head."""
        with self.memory.lanes.arriving():
            for layer, parts in enumerate(self.sent[-2:]):
                for (first, planes), head in product(parts, (1, 0)):
                    part = {name: plane[head : head + 1].clone() for name, plane in planes.items()}
                    count = next(iter(part.values())).shape[1]
                    self.memory.install(layer, range(head, head + 1), pages[first : first + count], part)
                    for plane in part.values():
                        plane.view(torch.uint8).fill_(0x77)

    def rows(self, pages: list[int], slots: list[int], _: int) -> None:
        """From slot to slot, and from there to host memory and a third one."""
        self.memory.copy_slot(slots[0], slots[1])
        exact = self.memory.export_rows(0, slots[1], ROWS).own()
        with self.memory.lanes.arriving():
            self.memory.install_rows(0, range(2), slots[2], ROWS, exact)


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
    """Computing and a copy by turns. All bytes that there are in the end."""
    for other, pages, slots, seed in day:
        with node.memory.lanes.computing(), Departures(node.memory.lanes) as out:
            node.compute(out, pages, slots, seed)
        OTHERS[other](node, pages, slots, seed)
    node.memory.lanes.compute.mark().wait()
    sent = [torch.cat([planes[name] for _, planes in parts], 1) for parts in node.sent for name in parts[0][1]]
    return [*tensors(node.memory.pools), *sent]


@pytest.mark.parametrize("codec", sorted(CODECS))
@given(day=DAYS, seed=st.integers(0, 1 << 30))
@settings(max_examples=8, deadline=None)
def test_lanes_that_lag_change_no_byte(codec: str, day: list[tuple[str, list[int], list[int], int]], seed: int) -> None:
    """Every codec, in every order that lanes and marks allow, and over torch's streams, against copies at once."""
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
