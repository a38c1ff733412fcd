"""Decides when a rule strikes, and strikes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from faults.plan import Action, FaultPlan, Point, Rule
from hackkv.errors import NodeLost
from hackkv.types import KvFrame

log = logging.getLogger(__name__)


class Hands(Protocol):
    """What a fault can do to the world around a node. None of these wait."""

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
class _Armed:
    """A rule on its node, with a chance of its own and what it has counted."""

    rule: Rule
    chance: random.Random
    seen: int = 0
    struck: int = 0

    def strikes(self, point: Point, request: str) -> bool:
        """Count the moment, if it is one, and say whether it is hit."""
        rule = self.rule
        if rule.at is not point or not fnmatchcase(request, rule.request):
            return False
        self.seen += 1
        spent = rule.times and self.struck >= rule.times
        hit = not spent and rule.nth in (0, self.seen) and self.chance.random() < rule.chance
        self.struck += hit
        return hit


class Injector:
    """The faults of one node. `on_strike` hears of each one in a few words."""

    def __init__(
        self, plan: FaultPlan, node: str, hands: Hands, on_strike: Callable[[str], None] = log.warning
    ) -> None:
        self._node, self._hands, self._on_strike = node, hands, on_strike
        self._armed = [
            _Armed(rule, random.Random(f"{plan.seed}/{node}/{index}"))
            for index, rule in enumerate(plan.rules)
            if fnmatchcase(node, rule.node)
        ]
        self.requests: dict[str, str] = {}
        """Transfer id -> request id, of the jobs that this node knows: frames carry the former only."""

    async def reach(self, point: Point, request: str) -> None:
        """Say that `request` is at `point`. Raises `NodeLost` if its connection is cut there."""
        for armed in self._strikes(point, request):
            await self._strike(armed.rule, request)

    async def reach_frame(self, frame: KvFrame) -> list[KvFrame]:
        """What becomes of a frame: none, one or two. Raises `NodeLost` if the connection is cut there."""
        request = self.requests.get(frame.transfer_id, "")
        frames = [frame]
        for armed in self._strikes(Point.FRAME, request):
            match armed.rule.do:
                case Action.DROP:
                    frames = []
                case Action.DUPLICATE:
                    frames = frames * 2
                case Action.CORRUPT:
                    frames = [_flipped(each, armed.chance) for each in frames]
                case Action.SLOW:
                    await asyncio.sleep(len(frame.payload) / armed.rule.bytes_per_s)
                case _:
                    await self._strike(armed.rule, request)
        return frames

    def _strikes(self, point: Point, request: str) -> list[_Armed]:
        striking = [armed for armed in self._armed if armed.strikes(point, request)]
        for armed in striking:
            self._on_strike(f"{self._node}: {armed.rule.do} at {point}" + (f" of {request}" if request else ""))
        return striking

    async def _strike(self, rule: Rule, request: str) -> None:
        match rule.do:
            case Action.DELAY:
                await asyncio.sleep(rule.seconds)
            case Action.STALL:
                await asyncio.Event().wait()
            case Action.CUT:
                raise NodeLost(f"{self._node}: the connection was cut at {rule.at}")
            case Action.KILL:
                self._hands.kill(self._node, rule.seconds)
                await asyncio.Event().wait()  # the dead say nothing more
            case Action.ABORT:
                self._hands.abort(request)
            case Action.FILL:
                self._hands.fill(self._node, rule.seconds)


def _flipped(frame: KvFrame, chance: random.Random) -> KvFrame:
    """The frame with one bit of its payload the other way round."""
    payload = bytearray(frame.payload)
    bit = chance.randrange(8 * len(payload))
    payload[bit // 8] ^= 1 << bit % 8
    return replace(frame, payload=bytes(payload))
