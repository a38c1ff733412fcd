"""The choice of a node for a request: pure functions over snapshots of the fleet.

Prefill: token-weighted shortest queue (HACK, section 7.1). Decode: fewest outstanding tokens among those with room.
Tokens of the prompt that a node holds are no work there. So a node that holds much of a prompt gets it, unless another
has that much less to do. Equal loads go to the node that was chosen longest ago, so an idle fleet is used in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from router.fleet.health import Health

_WELL = Health()


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens of KV that a request asks of a decode node: when it lands, and when its output is complete."""

    landing: int
    """Room for these must be free. The node finds room for later tokens as they come, by swapping if it must."""
    whole: int
    """A node that has fewer pages than these take can never serve the request."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """One prefill node as the policy sees it."""

    node_id: str
    queued_tokens: int
    chosen_at: int = 0
    """Number of the choice that last fell on this node."""
    health: Health = _WELL
    draining: bool = False
    held_tokens: int = 0
    """Tokens of the prompt in question that the node need not compute."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """One decode node as the policy sees it."""

    node_id: str
    outstanding_tokens: int
    free_pages: int
    total_pages: int
    page_tokens: int
    chosen_at: int = 0
    health: Health = _WELL
    draining: bool = False
    held_tokens: int = 0
    """Tokens of the prompt in question that need not be sent there."""

    def has_room(self, need: Need) -> bool:
        """Whether the request fits in the free pages now, and on the whole node in the end."""
        return pages_for(need.landing, self.page_tokens) <= self.free_pages and self.could_hold(need)

    def could_hold(self, need: Need) -> bool:
        """Whether the request fits once others have ended."""
        return pages_for(need.whole, self.page_tokens) <= self.total_pages and not self.draining


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


def _eligible(
    nodes: Sequence[PrefillLoad] | Sequence[DecodeLoad], now: float, avoid: AbstractSet[str]
) -> frozenset[str]:
    """Nodes to choose from: those that take requests at all. Two wishes narrow the choice one after another: nodes that
    are not suspended, then nodes not in `avoid`. A wish that would empty the choice is dropped."""
    choice = {node.node_id for node in nodes if not node.draining and not node.health.doubted}
    for wish in ({node.node_id for node in nodes if node.health.usable(now)}, choice - avoid):
        choice = (choice & wish) or choice
    return frozenset(choice)


def pick_prefill(nodes: Iterable[PrefillLoad], now: float = 0.0, avoid: AbstractSet[str] = frozenset()) -> str | None:
    """The prefill node that has the fewest tokens to compute until the prompt is complete; None only if no node takes
    requests."""
    nodes = list(nodes)
    eligible = _eligible(nodes, now, avoid)
    ranked = sorted(
        (node.queued_tokens - node.held_tokens, node.chosen_at, node.node_id)
        for node in nodes
        if node.node_id in eligible
    )
    return ranked[0][2] if ranked else None


def pick_decode(
    nodes: Iterable[DecodeLoad], need: Need, now: float = 0.0, avoid: AbstractSet[str] = frozenset()
) -> str | None:
    """The decode node with the fewest outstanding tokens, less those of the prompt that it holds, among those with room
    for `need`; None if none has.

    Health comes before room: when the healthy nodes are full, the request waits and no suspended node gets it.
    """
    nodes = list(nodes)
    eligible = _eligible(nodes, now, avoid)
    ranked = sorted(
        (node.outstanding_tokens - node.held_tokens, node.chosen_at, node.node_id)
        for node in nodes
        if node.node_id in eligible and node.has_room(need)
    )
    return ranked[0][2] if ranked else None
