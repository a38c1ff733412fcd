"""Pages that came from a decode node. They stay in host memory until a pass writes them to the pages of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from hackkv.types import KvFrame
from prefill_node.host_pool import Claim, HostPool, Tenant

if TYPE_CHECKING:  # the pool of page numbers uses this module and must load no tensor library
    from hack_kernels.base import Planes

    from hackkv.kv_memory import KvMemory

Part: TypeAlias = "tuple[KvFrame, tuple[Planes, ...]]"
"""A frame without its payload, and the payload's planes, by layer."""


class Fetched:
    """Pages [first, end) of a prompt, and the exact rows with which the prompt goes on. `release` must follow.

    They claim host memory as tenant `PREFIX`, and are pushed out as prefixes are.
    """

    def __init__(self, first: int, end: int, num_bytes: int) -> None:
        """The pages and rows take `num_bytes` at most."""
        self.first, self.end = first, end
        self.used = False
        """Whether a prompt has taken the pages over."""
        self.parts: tuple[Part, ...] = ()
        """All parts of a complete fetch; else none."""
        self.received_bytes = 0
        """Payload bytes that came over the wire."""
        self.wait_s = 0.0
        """Seconds until the first frame came."""
        self.seconds = 0.0
        """Seconds until the last frame came, or until the fetch was given up."""
        self._num_bytes = num_bytes
        self._host: HostPool | None = None
        self._claim: Claim | None = None

    def claim_room(self, host: HostPool) -> bool:
        """Claim host memory; False if there is none."""
        self._host, self._claim = host, host.claim(Tenant.PREFIX, self._num_bytes, self._forget)
        return self._claim is not None

    @property
    def pushed_out(self) -> bool:
        """Whether the pages have no claim on host memory: none yet, or none any more."""
        return self._claim is None

    def into(self, pages: tuple[int, ...], slot: int, first: int, rows: int) -> Install:
        """The copy of the pages from number `first` on to a prompt that holds `pages` and `slot`, and then `rows`
        rows."""
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
    """A copy of fetched parts to a prompt's pages, from number `first` on, and to its slot."""

    parts: tuple[Part, ...]
    pages: tuple[int, ...]
    slot: int
    first: int
    rows: int
    """Rows that the prompt holds after the copy."""

    def write(self, memory: KvMemory) -> None:
        """Write everything. No other sequence may use these pages and this slot."""
        runs = memory.footprint.runs(self.rows)
        with memory.lanes.arriving():
            for frame, layers in self.parts:
                skipped = 0 if frame.rows else self.first - frame.page_start
                if skipped > 0:
                    frame = replace(frame, page_start=self.first, page_count=frame.page_count - skipped)
                    layers = tuple({name: plane[:, skipped:] for name, plane in each.items()} for each in layers)
                if frame.page_count > 0:
                    memory.install_frame(frame, layers, self.pages, self.slot, runs)
            for layer in {layer for frame, _ in self.parts for layer in frame.layers}:
                memory.seal_rows(layer, self.pages, self.slot, self.rows, self.first)
