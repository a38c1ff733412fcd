"""Nouns of membership: who a node is, what it says of itself, and what the router answers. No torch here either."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from hackkv.types import Fingerprint, Role


@dataclass(frozen=True, slots=True)
class WireAddress:
    """A wire of a node (a name of `transport.wires.WIRES`), and the address at which the node takes handoffs on it.

    The address is empty on nodes that only send.
    """

    wire: str
    address: str

    @property
    def url(self) -> str:
        """The address with its wire, as `PrefillJob.decode_address` and `assign` name it."""
        return f"{self.wire}://{self.address}"


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's identity: a stable name, the address that peers dial, and a word that changes with its process."""

    node_id: str
    address: str
    incarnation: str
    wires: tuple[WireAddress, ...] = ()
    """The wires by which KV reaches the node, or leaves it."""


@dataclass(frozen=True, slots=True)
class CodecLoss:
    """The loss of a codec on a model, beside exact KV on a text (`hackkv.canary`)."""

    kl: float
    """KL(exact || codec) of the next token in nats, mean over positions. Not finite where the codec fails."""
    top1: float
    """Share of positions, in 0..1, at which both have the same first choice."""
    perplexity_ratio: float
    """Perplexity of the text with the codec over that with exact KV; may not be finite."""
    tokens: int
    """Length of the text."""


CONTROL_VERSION: Final = 2
"""Version of what router and nodes say to each other. Increases when one of them would misread another; how KV travels
has a version of its own, in the fingerprint."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The facts that a node tells when it registers, and again each time it renews its lease.

    `incarnation` changes when the process restarts. Page counts are zero on nodes that hold no pages for a role.
    `stats` are gauges for the metrics page, by Prometheus name.
    """

    node_id: str
    role: Role
    address: str
    incarnation: str
    model: str
    fingerprint: Fingerprint
    page_tokens: int
    max_context: int
    total_pages: int
    free_pages: int
    queued_tokens: int
    running: int
    waiting: int
    stats: tuple[tuple[str, float], ...] = ()
    draining: bool = False
    """Whether the node finishes what it has and takes nothing new."""
    kernels: str = ""
    """Backend and instruction set of its kernels, for display."""
    wires: tuple[WireAddress, ...] = ()
    """The node's wires, in order of preference."""
    loss: CodecLoss | None = None
    """The loss of the codec on the model; None for a lossless codec, and for one that nobody measured."""
    marks: bytes | None = field(default=None, repr=False)
    """Marks of sealed pages that later prompts can share (`hackkv.page_names`), one after another, those used last
    first; None on nodes that keep none."""
    control_version: int = CONTROL_VERSION

    def reached_at(self, address: str) -> NodeInfo:
        """The same node, dialled at `address` instead of its own; wires at its own address move with it."""
        wires = tuple(replace(one, address=address) if one.address == self.address else one for one in self.wires)
        return replace(self, address=address, wires=wires)


@dataclass(frozen=True, slots=True)
class Lease:
    """The router's answer to a registration: renew within `ttl_s` or be taken out of the fleet."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class Busiest:
    """The most that a node does at a time."""

    slots: int
    """Sequences in flight, resume points among them."""
    rows: int
    """Rows of one forward pass."""
    choices: int
    """Rows of a pass whose logits are computed."""
    recorded: int = 0
    """Rows of the largest step that a device records (`hackkv.model.graphs`)."""
