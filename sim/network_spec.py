"""The network between the replicas of a specification: section `network`."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from hackkv.config import Frozen


class LinkSharing(StrEnum):
    """How flows share links."""

    FAIR = "fair"
    """Max-min fair over all links on the way."""
    INDEPENDENT = "independent"
    """Every flow runs as if it were alone."""
    FIFO = "fifo"
    """A sender serves one flow after another."""


class Sending(StrEnum):
    """When KV leaves the prefill replica."""

    LAYERS = "layers"
    """Layer by layer, while the prompt is computed."""
    AFTER = "after"
    """When the prompt is complete."""


class RackSpec(Frozen):
    """Racks (or cells) whose machines share one uplink. It carries as much up as down, at the same time. Replicas fill
    the racks in the order of their numbers. A replica that takes several machines belongs to the rack of its first one.
    Each router (`policy.shards`) has racks of its own."""

    instances: int = Field(gt=0)
    """Machines of a rack."""
    uplink_gbit_s: float = Field(default=0.0, ge=0)
    """Rated rate of the uplink, each way."""
    oversubscription: float = Field(default=0.0, ge=0)
    """Alternative to `uplink_gbit_s`: the sum of the lines of a full rack, as a multiple of its uplink."""
    mixed: bool = False
    """True: every rack has its part of both roles. False: racks of prefill replicas come first, then those of decode
    replicas, and all KV crosses two uplinks."""

    @model_validator(mode="after")
    def _has_one_rate(self) -> Self:
        if bool(self.uplink_gbit_s) is bool(self.oversubscription):
            raise ValueError("either uplink_gbit_s or oversubscription is wanted")
        return self


class NetworkSpec(Frozen):
    """The network between the replicas."""

    sharing: LinkSharing = LinkSharing.FAIR
    sending: Sending = Sending.LAYERS
    blocking: bool = False
    """A prefill replica computes nothing while it sends."""
    link_gbit_s: float = Field(default=0.0, ge=0)
    """Caps every replica's line; 0 leaves the instance's."""
    receiver_gbit_s: float = Field(default=0.0, ge=0)
    """The rate at which a decode replica can verify and write; 0 is no limit."""
    rack: RackSpec | None = None
    """None: no bottleneck lies between the lines of two replicas."""
    request_s: float = Field(default=0.0, ge=0)
    """Fixed seconds of a request in the router, before it has a node: HTTP, tokens."""
    request_token_s: float = Field(default=0.0, ge=0)
    """Seconds in the router for each token of the prompt, in addition."""
    call_s: float = Field(default=0.0, ge=0)
    """Fixed seconds between router and prefill replica, there and back."""
