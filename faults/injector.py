"""Carries out the actions of rules that strike (`faults.armed` decides when)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from faults.armed import Armed, armed
from faults.plan import Action, FaultPlan, FaultRule, Point
from hackkv.errors import NodeLost
from hackkv.types import KvFrame, Payload

log = logging.getLogger(__name__)


class Hands(Protocol):
    """Actions of a fault outside the calls of a node. No method waits."""

    def kill(self, node: str, back_after_s: float) -> None:
        """End the node as SIGKILL would; start it again after `back_after_s`, if that is not 0."""
        ...

    def abort(self, request: str) -> None:
        """Make the client of `request` leave."""
        ...

    def fill(self, node: str, seconds: float) -> None:
        """Take all pages that the node has free, for `seconds`."""
        ...


class Injector:
    """The faults of one node. `on_strike` gets a short description of each strike."""

    def __init__(
        self, plan: FaultPlan, node: str, hands: Hands, on_strike: Callable[[str], None] = log.warning
    ) -> None:
        self._node, self._hands, self._on_strike = node, hands, on_strike
        self._armed = armed(plan, node)
        self.requests: dict[str, str] = {}
        """Transfer id -> request id of this node's jobs. Frames carry the transfer id only."""

    async def reach(self, point: Point, request: str) -> None:
        """Report that `request` is at `point`. Raises `NodeLost` if a rule cuts its connection there."""
        for one in self._strikes(point, request):
            await self._strike(one.rule, request)

    async def reach_frame(self, frame: KvFrame, point: Point = Point.FRAME) -> list[KvFrame]:
        """The frames to send in place of `frame`. Raises `NodeLost` if a rule cuts the connection there."""
        request = self.requests.get(frame.transfer_id, "")
        frames = [frame]
        for one in self._strikes(point, request):
            match one.rule.do:
                case Action.DROP:
                    frames = []
                case Action.DUPLICATE:
                    frames = frames * 2
                case Action.CORRUPT:
                    frames = [replace(each, payload=_flipped(each.payload, one.chance)) for each in frames]
                case Action.SLOW:
                    await asyncio.sleep(len(frame.payload) / one.rule.bytes_per_s)
                case _:
                    await self._strike(one.rule, request)
        return frames

    async def reach_parcel(self, payload: Payload) -> Payload:
        """The payload to send in place of `payload`. Raises `NodeLost` if a rule cuts the connection there."""
        for one in self._strikes(Point.SEND, ""):
            if one.rule.do is Action.CORRUPT:
                payload = _flipped(payload, one.chance)
            else:
                await self._strike(one.rule, "")
        return payload

    def _strikes(self, point: Point, request: str) -> list[Armed]:
        striking = [one for one in self._armed if one.strikes(point, request)]
        for one in striking:
            self._on_strike(f"{self._node}: {one.rule.do} at {point}" + (f" of {request}" if request else ""))
        return striking

    async def _strike(self, rule: FaultRule, request: str) -> None:
        match rule.do:
            case Action.DELAY:
                await asyncio.sleep(rule.seconds)
            case Action.STALL:
                await asyncio.Event().wait()
            case Action.CUT:
                raise NodeLost(f"{self._node}: the connection was cut at {rule.at}")
            case Action.KILL:
                self._hands.kill(self._node, rule.seconds)
                await asyncio.Event().wait()  # a killed process sends nothing more
            case Action.ABORT:
                self._hands.abort(request)
            case Action.FILL:
                self._hands.fill(self._node, rule.seconds)


def _flipped(payload: Payload, chance: random.Random) -> Payload:
    """The payload with one bit flipped. An empty payload stays empty."""
    flipped = bytearray(bytes(payload))
    if flipped:
        bit = chance.randrange(8 * len(flipped))
        flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
