"""Fault plans: what goes wrong, as data.

    seed: 7
    rules:
      - {at: wire.frame, do: corrupt, node: prefill-0, chance: 0.01, times: 3}
      - {at: decode.token, do: kill, node: decode-1, nth: 40, seconds: 5}

A rule counts the moments that match it, on each node separately. Whether it strikes depends on the seed, the node, the
rule and the count, never on time. So the same plan always strikes at the same moments.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from hackkv.config import Frozen


class Point(StrEnum):
    """Moments in a request's life at which a node can be struck, in their usual order."""

    REPORT = "node.report"
    """Before the node reports its state to the router: registration and every renewal."""
    DECODE_JOB = "decode.job"
    RESERVED = "decode.reserved"
    LENT = "decode.lent"
    """A frame that the decode node lends to the prefill node."""
    PREFILL_JOB = "prefill.job"
    ASSIGN = "prefill.assign"
    HANDOFF = "wire.handoff"
    CONNECT = "link.connect"
    """Before an end of a link connects. Links know no requests, so rules that name a request never strike at them."""
    FRAME = "wire.frame"
    SEND = "link.send"
    """Before a parcel is sent whose receiver is ready."""
    ARRIVING = "link.arriving"
    """The receiver has asked for a parcel, which may be under way."""
    ARRIVED = "link.arrived"
    SENT = "link.sent"
    FIRST_TOKEN = "prefill.first_token"
    END = "wire.end"
    RECEIPT = "wire.receipt"
    HANDED_OFF = "prefill.handed_off"
    HANDOFF_FAILED = "prefill.handoff_failed"
    LANDED = "decode.landed"
    TOKEN = "decode.token"
    SWAPPED = "decode.swapped"
    DECODED = "decode.decoded"


class Action(StrEnum):
    """What a strike does."""

    DELAY = "delay"
    """The call, event or frame waits for `seconds`."""
    STALL = "stall"
    """The call, event or frame waits forever, without an error."""
    CUT = "cut"
    """The connection breaks."""
    DROP = "drop"
    """A frame is lost."""
    CORRUPT = "corrupt"
    """A bit of a payload flips, in a frame or in a parcel."""
    DUPLICATE = "duplicate"
    """A frame comes twice."""
    SLOW = "slow"
    """A frame waits for its size divided by `bytes_per_s`."""
    KILL = "kill"
    """The node dies at once. After `seconds`, if not 0, it is started again."""
    ABORT = "abort"
    """The client leaves."""
    FILL = "fill"
    """All pages that a decode node has free are taken for `seconds`."""


AT_LINKS = (Point.CONNECT, Point.SEND, Point.ARRIVING, Point.ARRIVED, Point.SENT)
"""Points before, during and after a parcel. Only wires with links reach them."""
ON_FRAMES = frozenset({Action.DROP, Action.CORRUPT, Action.DUPLICATE, Action.SLOW})
TIMED = frozenset({Action.DELAY, Action.FILL})


class FaultRule(Frozen):
    """One thing that goes wrong. `node` and `request` are shell patterns over their names."""

    at: Point
    do: Action
    node: str = "*"
    request: str = "*"
    nth: int = Field(default=0, ge=0)
    """Strike only at the nth matching moment of a node, counted from 1; 0 is every moment."""
    chance: float = Field(default=1.0, ge=0, le=1)
    times: int = Field(default=1, ge=0)
    """The most strikes at each node; 0 is no limit."""
    seconds: float = Field(default=0.0, ge=0)
    bytes_per_s: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        places = (Point.LENT, Point.FRAME, *([Point.SEND] if self.do is Action.CORRUPT else []))
        if self.do in ON_FRAMES and self.at not in places:
            raise ValueError(f"{self.do} strikes at {' and '.join(places)} only")
        if self.do is Action.FILL and not self.at.startswith("decode."):
            raise ValueError(f"{self.do} strikes decode nodes only")
        if self.do in TIMED and not self.seconds:
            raise ValueError(f"{self.do} needs seconds")
        if (self.do is Action.SLOW) != bool(self.bytes_per_s):
            raise ValueError(f"bytes_per_s goes with {Action.SLOW}, and it needs it")
        return self


class FaultPlan(Frozen):
    """Everything that goes wrong in one cluster."""

    seed: int = 0
    rules: tuple[FaultRule, ...] = ()
