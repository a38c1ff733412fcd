"""What the fleet can serve at most, remembered for a while when a node is away: it may only be restarting."""

from __future__ import annotations

from collections.abc import Iterable

from hackkv.types import NodeInfo, Role


class Memory:
    """Last reports of nodes that left."""

    def __init__(self, keep_s: float) -> None:
        """A node that has been away for `keep_s` is forgotten, unless it was the last of its role."""
        self._keep_s = keep_s
        self._left: dict[tuple[Role, str], tuple[NodeInfo, float]] = {}

    def came(self, info: NodeInfo) -> None:
        """A node speaks for itself again."""
        self._left.pop((info.role, info.node_id), None)

    def left(self, info: NodeInfo, now: float) -> None:
        """A node is away."""
        self._left[info.role, info.node_id] = info, now

    def knows(self, role: Role) -> bool:
        """Whether a node of this role was ever here and left."""
        return any(known is role for known, _ in self._left)

    def of(self, role: Role, live: Iterable[NodeInfo], now: float) -> list[NodeInfo]:
        """Nodes that are here or may come back; of a role that nobody fills, all that ever were."""
        here = list(live)
        away = [(info, since) for (known, _), (info, since) in self._left.items() if known is role]
        return here + [info for info, since in away if not here or now - since < self._keep_s]
