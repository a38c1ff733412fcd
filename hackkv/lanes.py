"""The ways of KV between a device and host memory, while the device computes.

A device works off *lanes*, each in its own order: `compute` runs the model, `outflow` brings pages to host memory,
`inflow` brings them back. A *mark* is a place in a lane; another lane or the host waits for it. Both ways go through
the slots of a *ring*, host memory that a device reads and writes by itself while the host goes on.

On the processor host memory is the device's own: lanes do what they are given at once, and nothing goes through a ring.

Rules that every copy keeps:

    A copy begins when everything that compute had been given at the last `written` is done. It waits for nothing later.
    Before a copy's mark is done, the host reports its pages neither as filled nor as free.
    A slot has one owner; the ring gives it to the next one when the last copy that touches it is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from hack_kernels.base import Planes
from torch import Tensor

from hackkv.errors import HackkvError
from hackkv.streams import DONE, InlineLane, Lane, Mark, StreamLane

ALIGNED: Final = 256
"""Tensors in a slot begin at multiples of this many bytes, as memory that CUDA gives does: kernels are compiled for
that."""
SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 16
SLOT_S: Final = 60.0
"""Seconds to wait for a slot. An owner that keeps one longer will not give it back."""


class Slot:
    """Some host memory, filled from its beginning."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is uint8, [bytes]."""
        self.memory = memory
        self._end = 0

    def put(self, planes: Planes) -> Planes:
        """Copies in the next bytes, which a device may still have to write. Raises `ValueError` if they do not fit."""
        views = Planes()
        for name, plane in planes.items():
            stop = self._end + plane.nbytes
            if stop > self.memory.numel():
                raise ValueError(f"{stop} bytes do not fit into a slot of {self.memory.numel()}")
            views[name] = self.memory[self._end : stop].view(plane.dtype).view(plane.shape)
            views[name].copy_(plane, non_blocking=True)
            self._end = -(-stop // ALIGNED) * ALIGNED
        return views

    def clear(self) -> None:
        """Empty the slot."""
        self._end = 0


class HostRing:
    """A fixed number of slots. Any thread may take one.

    A thread that owns slots takes another only if `free` says that there is one: so no thread waits for itself.
    """

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        memory = torch.empty((slots, slot_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._free = deque(map(Slot, memory))
        self._leaving = deque[tuple[Slot, Mark]]()
        """Slots without an owner, which a copy still touches; the oldest first."""
        self._changed = threading.Condition()

    def take(self) -> Slot:
        """A slot, empty. Raises `HackkvError` when none comes back for `SLOT_S`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._leaving, SLOT_S):
                raise HackkvError(f"none of {self.slots} slots of host memory came back within {SLOT_S:g} s")
            slot, mark = (self._free.popleft(), DONE) if self._free else self._leaving.popleft()
        mark.wait()
        slot.clear()
        return slot

    def give_back(self, slot: Slot, mark: Mark = DONE) -> None:
        """The slot may be taken when `mark` is done."""
        with self._changed:
            if mark.done:
                self._free.append(slot)
            else:
                self._leaving.append((slot, mark))
            self._changed.notify()

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free) + len(self._leaving)


class Leaving:
    """Planes on their way to host memory. Whoever has this enters it once, or calls `own` once: that frees its slot."""

    def __init__(
        self, first: int, give_back: Callable[[Mark], None] | None = None, planes: Planes | None = None
    ) -> None:
        """`give_back` frees the slot in which the planes arrive; None if they arrive in none."""
        self.first = first
        """The number of the first page in here, counted among those that were asked for."""
        self.mark: Mark = DONE
        self.planes = planes
        self._give_back = give_back

    def __enter__(self) -> Planes:
        """The planes, once they have arrived. Those in a slot are valid until the `with` block ends."""
        self.mark.wait()
        assert self.planes is not None, "a mark is done behind the work before it"
        return self.planes

    def __exit__(self, *exc: object) -> None:
        if self._give_back is not None:
            self._give_back(self.mark)

    def own(self) -> Planes:
        """The planes, once they have arrived, in memory of their own."""
        with self as planes:
            return planes if self._give_back is None else {name: plane.clone() for name, plane in planes.items()}


class Departures:
    """Planes that one thread sends off one after another, each with a call to make when it has arrived. Calls keep the
    order. The thread waits for an arrival only when slots run short.

    The end of the `with` block waits for all of them. If the block fails, the calls that are left are not made, since
    pages may change then.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._waiting = deque[tuple[Leaving, Callable[[Leaving, Planes], None]]]()

    def send(self, parts: Iterator[Leaving], then: Callable[[Leaving, Planes], None]) -> None:
        """Send parts off; `then` is called with each of them, at once if nothing has to be waited for. Leaves a slot
        free, so that the thread may take one for the next part."""
        while True:
            while self._waiting and not self._lanes.has_room:
                self._end_one()
            part = next(parts, None)
            if part is None:
                return
            self._waiting.append((part, then))
            while self._waiting and self._waiting[0][0].mark.done:
                self._end_one()

    def __enter__(self) -> Departures:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            while self._waiting and kind is None:
                self._end_one()
        finally:
            while self._waiting:
                with self._waiting.popleft()[0]:
                    pass

    def _end_one(self) -> None:
        part, then = self._waiting.popleft()
        with part as planes:
            then(part, planes)


class Lanes:
    """The lanes of the device on which a node's KV lies, and the ring between it and host memory.

    Methods but `written` may be called by any thread.
    """

    def __init__(
        self, device: torch.device, lanes: tuple[Lane, Lane, Lane] | None = None, ring: HostRing | None = None
    ) -> None:
        """`lanes` are compute, inflow and outflow; without a ring, those of the processor."""
        self.device = device
        self.compute, self.inflow, self.outflow = lanes or (InlineLane(),) * 3
        self.ring = ring
        self._written: Mark = DONE

    @property
    def inline(self) -> bool:
        """Whether the calling thread copies by itself, so that there is no device to wait for."""
        return self.ring is None

    @property
    def has_room(self) -> bool:
        """Whether a copy can begin before another is over."""
        return self.ring is None or self.ring.free > 0

    def written(self) -> None:
        """Let copies read and replace what compute was given until now. The computing thread calls this."""
        self._written = self.compute.mark()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Says `written` when the block ends, even if it fails."""
        try:
            yield
        finally:
            self.written()

    def pieces(self, count: int, sizes: Sequence[int]) -> Iterator[range]:
        """`count` pages in parts that fit into a slot each; `sizes` are the bytes of a page's tensors."""
        most = count if self.ring is None else (self.ring.slot_bytes - ALIGNED * (len(sizes) + 1)) // (sum(sizes) + 8)
        return (range(at, min(at + most, count)) for at in range(0, count, most or 1))

    def fetch(self, ids: Tensor, read: Callable[[Tensor], Planes], first: int = 0) -> Leaving:
        """Bring the new tensors that `read` makes of `ids` [P] int64, which lie on the device then, to host memory."""
        if self.ring is None:
            return Leaving(first, planes=read(ids))
        ring, slot = self.ring, self.ring.take()
        leaving = Leaving(first, lambda mark: ring.give_back(slot, mark))

        def copy() -> None:
            planes = read(there.to(self.device, non_blocking=True))
            leaving.planes = slot.put(planes)

        try:
            there = slot.put({"": ids})[""]
            self.outflow.wait(self._written)
            self.outflow.run(copy)
        except BaseException:
            ring.give_back(slot, self.outflow.mark())
            raise
        leaving.mark = self.outflow.mark()
        return leaving

    def bring(
        self, ids: Tensor, planes: Planes, write: Callable[[Tensor, Planes], None], *, resident: bool = False
    ) -> None:
        """Bring `ids` [P] int64 and `planes` to the device, where `write` takes them; see `arriving`.

        The caller may reuse the memory of both at once; not that of `resident` planes, which lie on the device already
        and are read where they are.
        """
        if self.ring is None:
            write(ids, planes)
            return
        slot = self.ring.take()

        def copy() -> None:
            there = {name: plane.to(self.device, non_blocking=True) for name, plane in here.items()}
            write(there.pop(""), planes if resident else there)

        try:
            here = slot.put({"": ids} if resident else {"": ids, **planes})
            self.inflow.wait(self._written)
            self.inflow.run(copy)
        finally:
            self.ring.give_back(slot, self.inflow.mark())

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Writes queued in the block finish before it exits, even on error, because the pages may then get a new
        owner."""
        try:
            yield
        finally:
            self.inflow.mark().wait()


def lanes_on(device: torch.device, most_bytes: int) -> Lanes:
    """The lanes of a device. On a GPU the ring takes `SLOTS` slots, each large enough for `most_bytes` of one copy."""
    if device.type != "cuda":
        return Lanes(device)
    lanes = StreamLane(device, beside=False), StreamLane(device, beside=True), StreamLane(device, beside=True)
    return Lanes(device, lanes, HostRing(SLOTS, max(SLOT_BYTES, most_bytes), pinned=True))
