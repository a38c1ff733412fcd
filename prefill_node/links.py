"""Measures the links to decode nodes by the pushes that pass them: a `KvPusher` around the wire's.

A link's time is the time for which a push waits for the link: from each frame until the wire takes the next one, and
from the end until the receiver has committed. Time in which no frame is ready does not count. A push of few bytes
measures the latency, not the speed of the link, and is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Final

from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from hackkv.wire_choice import ChosenForm, CodingCosts, Rate
from hackkv.wire_form import RAW, WireForm
from transport.base import KvPusher
from transport.closing import closing

ENOUGH_BYTES: Final = 256 << 10
"""The smallest push that measures its link."""


class Links:
    """Implements `KvPusher`, and chooses the wire form of the frames for an address."""

    def __init__(
        self, sender: KvPusher, form: WireForm, where_it_pays: bool = False, now: Callable[[], float] = perf_counter
    ) -> None:
        """Frames are coded in `form`: always, or with `where_it_pays` only where that saves time."""
        self._sender, self._form, self._where_it_pays, self._now = sender, form, where_it_pays, now
        self._coder = CodingCosts(form)
        self.rates: defaultdict[str, Rate] = defaultdict(Rate)
        """The rate of pushes, by address."""

    def form(self, address: str) -> WireForm:
        """The wire form of the frames of a handoff to `address`; "" while no decode node is named."""
        if not self._where_it_pays:
            return self._form
        return ChosenForm(self._coder, self.rates[address] if address else Rate())

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Push by the wire's sender, and measure the link; see `KvPusher`."""
        passage = _Passage(self._now)
        receipt = await self._sender.push(address, handoff, passage.of(frames))
        passage.over()
        if passage.num_bytes >= ENOUGH_BYTES:
            self.rates[address].add(passage.num_bytes, passage.seconds)
        return receipt

    def fetch_form(self, address: str) -> WireForm:
        """The wire form in which planes should come from `address`: the coded one if it would pay towards `address`."""
        pays = not self._where_it_pays or self._coder.pays(self.rates[address])
        return self._form if pays else RAW

    async def close(self) -> None:
        """Close the wire's sender."""
        await self._sender.close()


class _Passage:
    """The items of one push on their way into the wire."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left_at = 0.0
        self.num_bytes = 0
        self.seconds = 0.0

    async def of(self, frames: AsyncIterator[KvFrame | HandoffEnd]) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Pass on `frames`, and count their bytes and the time for which the wire needs them."""
        async with closing(frames):
            async for item in frames:
                self._left_at = self._now()
                yield item
                if isinstance(item, KvFrame):
                    self.over()
                    self.num_bytes += len(item.payload)

    def over(self) -> None:
        """Note that the last item has left."""
        now = self._now()
        self.seconds, self._left_at = self.seconds + now - self._left_at, now
