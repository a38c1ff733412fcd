"""Pages that came from a decode node: in host memory, until a pass begins that writes them to the pages of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from hackkv.types import KvFrame
from prefill_node.host_pool import Claim, HostPool, Tenant

if TYPE_CHECKING:  # the page book decides about what is fetched, and loads no tensor library
    from hack_kernels.base import Planes

    from hackkv.kv_memory import KvMemory

Part: TypeAlias = "tuple[KvFrame, Planes]"
"""A frame without its payload, and what the payload was."""


class Fetched:
    """Pages [first, end) of a prompt, and the exact rows with which it goes on. `release` must follow.

    They claim host memory as kept prefixes do, and are pushed out as those are.
    """

    def __init__(self, first: int, end: int, num_bytes: int) -> None:
        """They are `num_bytes` at most."""
        self.first, self.end = first, end
        self.used = False
        """Whether a prompt has taken them over."""
        self.parts: tuple[Part, ...] = ()
        """Everything, or nothing."""
        self.received_bytes = 0
        """On the wire."""
        self.wait_s = 0.0
        """Until the first frame came."""
        self.seconds = 0.0
        """Until the last frame came, or what was fetched was given up."""
        self._num_bytes = num_bytes
        self._host: HostPool | None = None
        self._claim: Claim | None = None

    def claim_room(self, host: HostPool) -> bool:
        """Claim host memory; False if there is none."""
        self._host, self._claim = host, host.claim(Tenant.PREFIX, self._num_bytes, self._forget)
        return self._claim is not None

    @property
    def pushed_out(self) -> bool:
        """True before it has host memory, and once that is gone."""
        return self._claim is None

    def into(self, pages: tuple[int, ...], slot: int, first: int, rows: int) -> Install:
        """Bring the pages from number `first` on to a prompt that holds `pages`, `slot` and then `rows` rows."""
        self.used = True
        return Install(self.parts, pages, slot, first, rows)

    def release(self) -> None:
        """Give the memory back. A repeat has no effect."""
        if self._host is not None and self._claim is not None:
            self._host.release(self._claim)
        self._forget()

    def _forget(self) -> None:
        self._claim, self.parts = None, ()


@dataclass(frozen=True, slots=True)
class Install:
    """Write what was fetched to a prompt's pages, from number `first` on, and to its slot."""

    parts: tuple[Part, ...]
    pages: tuple[int, ...]
    slot: int
    first: int
    rows: int
    """Rows that the prompt holds then."""

    def write(self, memory: KvMemory) -> None:
        """Write everything; nobody else may use these pages and this slot."""
        runs = memory.footprint.runs(self.rows)
        with memory.lanes.arriving():
            for frame, planes in self.parts:
                skipped = 0 if frame.rows else self.first - frame.page_start
                if skipped > 0:
                    frame = replace(frame, page_start=self.first, page_count=frame.page_count - skipped)
                    planes = {name: plane[:, skipped:] for name, plane in planes.items()}
                if frame.page_count > 0:
                    memory.install_frame(frame, planes, self.pages, self.slot, runs)
            for layer in {frame.layer for frame, _ in self.parts}:
                memory.seal_rows(layer, self.pages, self.slot, self.rows, self.first)
