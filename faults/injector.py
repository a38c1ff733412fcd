"""Decides when a rule strikes, and carries out its action."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from faults.plan import Action, FaultPlan, FaultRule, Point
from hackkv.errors import NodeLost
from hackkv.types import KvFrame, Payload

log = logging.getLogger(__name__)


class Hands(Protocol):
    """What a fault can do outside the calls of a node. No method waits."""

    def kill(self, node: str, back_after_s: float) -> None:
        """End the node as SIGKILL would; start it again after `back_after_s`, if that is not 0."""
        ...

    def abort(self, request: str) -> None:
        """Make the client of `request` leave."""
        ...

    def fill(self, node: str, seconds: float) -> None:
        """Take all pages that the node has free, for `seconds`."""
        ...


@dataclass(slots=True)
class Armed:
    """A rule on one node, with its own random numbers and counts."""

    rule: FaultRule
    chance: random.Random
    seen: int = 0
    struck: int = 0

    def strikes(self, point: Point, request: str) -> bool:
        """Count the moment if it matches the rule. Returns whether the rule strikes now."""
        rule = self.rule
        if rule.at is not point or not fnmatchcase(request, rule.request):
            return False
        self.seen += 1
        spent = rule.times and self.struck >= rule.times
        hit = not spent and rule.nth in (0, self.seen) and self.chance.random() < rule.chance
        self.struck += hit
        return hit


def armed(plan: FaultPlan, node: str) -> list[Armed]:
    """The rules that concern a node, each at its beginning."""
    return [
        Armed(rule, random.Random(f"{plan.seed}/{node}/{index}"))
        for index, rule in enumerate(plan.rules)
        if fnmatchcase(node, rule.node)
    ]


class Injector:
    """The faults of one node. `on_strike` hears of each one in a few words."""

    def __init__(
        self, plan: FaultPlan, node: str, hands: Hands, on_strike: Callable[[str], None] = log.warning
    ) -> None:
        self._node, self._hands, self._on_strike = node, hands, on_strike
        self._armed = armed(plan, node)
        self.requests: dict[str, str] = {}
        """Transfer id -> request id of this node's jobs. Frames carry the transfer id only."""

    async def reach(self, point: Point, request: str) -> None:
        """Report that `request` is at `point`. Raises `NodeLost` if a rule cuts its connection there."""
        for armed in self._strikes(point, request):
            await self._strike(armed.rule, request)

    async def reach_frame(self, frame: KvFrame, point: Point = Point.FRAME) -> list[KvFrame]:
        """The frames that leave in place of `frame`. Raises `NodeLost` if a rule cuts the connection there."""
        request = self.requests.get(frame.transfer_id, "")
        frames = [frame]
        for armed in self._strikes(point, request):
            match armed.rule.do:
                case Action.DROP:
                    frames = []
                case Action.DUPLICATE:
                    frames = frames * 2
                case Action.CORRUPT:
                    frames = [replace(each, payload=_flipped(each.payload, armed.chance)) for each in frames]
                case Action.SLOW:
                    await asyncio.sleep(len(frame.payload) / armed.rule.bytes_per_s)
                case _:
                    await self._strike(armed.rule, request)
        return frames

    async def reach_parcel(self, payload: Payload) -> Payload:
        """What leaves over a link in place of `payload`. Raises `NodeLost` if a rule cuts the connection there."""
        for armed in self._strikes(Point.SEND, ""):
            if armed.rule.do is Action.CORRUPT:
                payload = _flipped(payload, armed.chance)
            else:
                await self._strike(armed.rule, "")
        return payload

    def _strikes(self, point: Point, request: str) -> list[Armed]:
        striking = [armed for armed in self._armed if armed.strikes(point, request)]
        for armed in striking:
            self._on_strike(f"{self._node}: {armed.rule.do} at {point}" + (f" of {request}" if request else ""))
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
    """The payload with one bit flipped."""
    flipped = bytearray(bytes(payload))
    bit = chance.randrange(8 * len(flipped))
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
