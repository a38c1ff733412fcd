"""Which node gets a request: pure functions over snapshots of the fleet.

Prefill: token-weighted shortest queue (HACK, section 7.1). Decode: fewest outstanding tokens among those with room.
Equal loads go to the node that was chosen longest ago, so an idle fleet is used in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """When a node failed us last, in seconds on the router's clock."""

    suspended_until: float = 0.0
    """Later than now: do not use the node, unless there is no other."""
    probing: bool = False
    """A suspension has run out and one request is out to see whether the node works again."""

    def usable(self, now: float) -> bool:
        """Whether requests may go there."""
        return now >= self.suspended_until and not self.probing


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """One prefill node as the policy sees it."""

    node_id: str
    queued_tokens: int
    chosen_at: int = 0
    """Count of choices when this node was last chosen."""
    health: Health = Health()


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """One decode node as the policy sees it."""

    node_id: str
    outstanding_tokens: int
    free_pages: int
    page_tokens: int
    chosen_at: int = 0
    health: Health = Health()

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` tokens of KV fit in the free pages."""
        return pages_for(tokens, self.page_tokens) <= self.free_pages


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


def _eligible(
    nodes: Sequence[PrefillLoad] | Sequence[DecodeLoad], now: float, avoid: AbstractSet[str]
) -> frozenset[str]:
    """Nodes to choose from. Wishes narrow the choice one after another and never empty it."""
    choice = {node.node_id for node in nodes}
    for wish in ({node.node_id for node in nodes if node.health.usable(now)}, choice - avoid):
        choice = (choice & wish) or choice
    return frozenset(choice)


def pick_prefill(nodes: Iterable[PrefillLoad], now: float = 0.0, avoid: AbstractSet[str] = frozenset()) -> str | None:
    """The prefill node with the fewest queued tokens; None only if there is no node."""
    nodes = list(nodes)
    eligible = _eligible(nodes, now, avoid)
    ranked = sorted((node.queued_tokens, node.chosen_at, node.node_id) for node in nodes if node.node_id in eligible)
    return ranked[0][2] if ranked else None


def pick_decode(
    nodes: Iterable[DecodeLoad], tokens: int, now: float = 0.0, avoid: AbstractSet[str] = frozenset()
) -> str | None:
    """The decode node with the fewest outstanding tokens among those with room for `tokens`; None if none has.

    Health comes before room: a suspended node does not get a request because the healthy ones are full.
    """
    nodes = list(nodes)
    eligible = _eligible(nodes, now, avoid)
    ranked = sorted(
        (node.outstanding_tokens, node.chosen_at, node.node_id)
        for node in nodes
        if node.node_id in eligible and node.has_room(tokens)
    )
    return ranked[0][2] if ranked else None
