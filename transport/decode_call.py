"""A call of `DecodeNode.decode` that hands on each event as soon as it comes.

An iterator costs its reader a turn of the event loop for each event, and most events of a router are tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hackkv.types import DecodeEvent, DecodeJob
from transport.trunk import Body, TrunkCall


@dataclass(slots=True)
class _Taker:
    """The reader that waits in `each`."""

    take: Callable[[DecodeEvent], bool]
    done: asyncio.Future[Exception | None]
    """Resolves when nothing more is to be handed on: to the error, or to None if `take` returned True or the call ended
    well."""


class DecodeCall(TrunkCall[DecodeJob, DecodeEvent]):
    """The events of one job, as an iterator or by `each`."""

    _taker: _Taker | None = None

    async def each(self, take: Callable[[DecodeEvent], bool]) -> None:
        """Hand further events to `take` until it returns True or the call ends. `take` must not wait for anything.

        Raises errors of the node and of `take`. Any error ends the call.
        """
        if self._over:
            return
        taker = _Taker(take, asyncio.get_running_loop().create_future())
        outcome: Exception | None = None
        try:
            await self._begin()
            while self._arrived:
                self._settle(taker, self._arrived.popleft())
            self._taker = taker
            outcome = await taker.done
            if outcome is not None:
                raise outcome
        except BaseException:
            await self.aclose()
            raise
        finally:  # an error refers to this frame: without `del` that cycle would wait for the garbage collector
            self._taker = None
            del taker, outcome

    def _take(self, body: Body) -> None:
        if self._taker is None:
            super()._take(body)
        else:
            self._settle(self._taker, body)

    def _settle(self, taker: _Taker, body: Body) -> None:
        """Hand on one event, or the end of the call."""
        if taker.done.done():
            return
        try:
            if not isinstance(body, bytes):
                self._over = True
                taker.done.set_result(body)
            elif taker.take(self._events.decode(body)):
                taker.done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised where `each` waits
            taker.done.set_result(error)
