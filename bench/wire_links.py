"""Frames over links of several speeds, raw, coded and as `auto` chooses; rows of `python -m bench.wire_forms`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Final

from hack_kernels.base import Planes

from hackkv.expected import Expected
from hackkv.framing import FrameWriter
from hackkv.ledger import FrameLedger
from hackkv.model.worker import Worker
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, Receipt
from hackkv.wire_choice import CODER
from hackkv.wire_form import RAW, WireForm, wire_form
from prefill_node.links import Links
from transport.closing import closing

LINKS: Final = (50, 200, 1000, 0)
"""Mbit/s; 0 is a link that takes no time."""
REPEATS: Final = 3
ADDRESS: Final = "paced"

Sealed = Sequence[tuple[int, int, Planes]]
"""(layer, first page, planes) of every chunk."""


class PacedLink:
    """A `KvSender` over a link of a given rate, with a decode node that opens the frames."""

    def __init__(self, bytes_per_s: float, worker: Worker, tokens: int, form: WireForm) -> None:
        self._bytes_per_s, self._worker, self._tokens, self._form = bytes_per_s, worker, tokens, form
        self.sent = 0

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send frames at the link's rate; return when every frame is decoded."""
        codec = self._worker.codec
        expected = Expected(self._worker.layout, codec.wire_planes, self._tokens, self._worker.footprint, self._form)
        ledger = FrameLedger("bench", 0, expected)
        loop, free_at, self.sent = asyncio.get_running_loop(), perf_counter(), 0
        landed = list[asyncio.Future[tuple[Planes, ...]]]()
        with ThreadPoolExecutor(1) as landing:
            async with closing(frames):
                async for item in frames:
                    if not isinstance(item, KvFrame):
                        break
                    self.sent += len(item.payload)
                    if self._bytes_per_s:
                        free_at = max(free_at, perf_counter()) + len(item.payload) / self._bytes_per_s
                        await asyncio.sleep(free_at - perf_counter())
                    landed.append(loop.run_in_executor(landing, ledger.accept, item))
            await asyncio.gather(*landed)
        return Receipt("bench", self._tokens, (), 0, 0, 0.0)

    async def close(self) -> None:
        """Do nothing: no resource is open."""


async def written(sealed: Sealed, form: WireForm) -> AsyncIterator[KvFrame | HandoffEnd]:
    """Frames that an engine's thread writes, ahead of the link."""
    writer, loop = FrameWriter("bench", 0, form), asyncio.get_running_loop()
    queue: asyncio.Queue[KvFrame | HandoffEnd] = asyncio.Queue()

    def write() -> None:
        for layer, first, planes in sealed:
            for frame in writer.frames(layer, first, [planes]):
                loop.call_soon_threadsafe(queue.put_nowait, frame)
        loop.call_soon_threadsafe(queue.put_nowait, writer.end(0))

    with ThreadPoolExecutor(1) as engine:
        done = loop.run_in_executor(engine, write)
        while isinstance(item := await queue.get(), KvFrame):
            yield item
        await done
        yield item


async def bring(worker: Worker, sealed: Sealed, tokens: int, megabits: int, how: str) -> tuple[float, int]:
    """(seconds, bytes) of a handoff, the best of `REPEATS`. `how` is a wire form or `auto`."""
    coder = wire_form(CODER)
    link = PacedLink(megabits * 1e6 / 8, worker, tokens, coder)
    links, handoff = Links(link, coder, how == "auto"), Handoff("bench", 0, Fingerprint(()), tokens)
    times = list[float]()
    for _ in range(REPEATS + 1):
        form = RAW if how == "raw" else links.form(ADDRESS)
        began = perf_counter()
        await links.push(ADDRESS, handoff, written(sealed, form))
        times.append(perf_counter() - began)
    return min(times[1:]), link.sent


def link_row(codec: str, megabits: int, worker: Worker, sealed: Sealed, tokens: int) -> str:
    """A line of the table."""
    cells = []
    for how in ("raw", CODER, "auto"):
        seconds, sent = asyncio.run(bring(worker, sealed, tokens, megabits, how))
        cells.append(f"{seconds * 1e3:.0f} ({sent / 1e6:.2f})")
    return f"| `{codec}` | {megabits or 'free'} | {' | '.join(cells)} |"
