"""What lies between the replicas of a specification: `network`."""

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
    """Every flow as if it were alone."""
    FIFO = "fifo"
    """A sender serves one flow after another."""


class Sending(StrEnum):
    """When KV leaves."""

    LAYERS = "layers"
    """Layer by layer, while the prompt is computed."""
    AFTER = "after"
    """When the prompt is complete."""


class RackSpec(Frozen):
    """Racks (or cells) whose machines share one uplink. It carries as much up as down, at the same time. Replicas fill
    the racks in the order of their numbers; one that takes several machines is where its first one is. Each router
    (`policy.shards`) has racks of its own."""

    instances: int = Field(gt=0)
    """Machines of a rack."""
    uplink_gbit_s: float = Field(default=0.0, ge=0)
    """Rated, each way."""
    oversubscription: float = Field(default=0.0, ge=0)
    """Instead: what the lines of a full rack sum to, as a multiple of its uplink."""
    mixed: bool = False
    """Every rack has its part of both roles. Else racks of prefill replicas come first, then those of decode replicas,
    and all KV crosses two uplinks."""

    @model_validator(mode="after")
    def _has_one_rate(self) -> Self:
        if bool(self.uplink_gbit_s) is bool(self.oversubscription):
            raise ValueError("either uplink_gbit_s or oversubscription is wanted")
        return self


class NetworkSpec(Frozen):
    """What lies between the replicas."""

    sharing: LinkSharing = LinkSharing.FAIR
    sending: Sending = Sending.LAYERS
    blocking: bool = False
    """A prefill replica computes nothing while it sends."""
    link_gbit_s: float = Field(default=0.0, ge=0)
    """Caps every replica's line; 0 leaves the instance's."""
    receiver_gbit_s: float = Field(default=0.0, ge=0)
    """What a decode replica can verify and write; 0 is no limit."""
    rack: RackSpec | None = None
    """None: between replicas' lines is no bottleneck."""
    request_s: float = Field(default=0.0, ge=0)
    """Fixed seconds of a request in the router, before it has a node: HTTP, tokens."""
    request_token_s: float = Field(default=0.0, ge=0)
    """The same for each token of its prompt."""
    call_s: float = Field(default=0.0, ge=0)
    """Fixed seconds between router and prefill replica, there and back."""
