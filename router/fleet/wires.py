"""The wire that takes KV from one node to another. A node that shares no wire with its peers is refused."""

from __future__ import annotations

from collections.abc import Iterable

from hackkv.errors import HandshakeRefused, NodeLost
from hackkv.nodes import NodeInfo
from hackkv.types import Role


def kv_address(prefill: NodeInfo, decode: NodeInfo) -> str:
    """The URL to which `prefill` sends KV for `decode`: on the first of its wires that both have.

    Raises `NodeLost` when there is none: one of the two has come back with other wires.
    """
    theirs = {one.wire: one for one in decode.wires}
    for one in prefill.wires:
        if one.wire in theirs:
            return theirs[one.wire].url
    raise NodeLost(f"{prefill.node_id} and {decode.node_id} share no wire: {_names(prefill)} and {_names(decode)}")


def check_wires(info: NodeInfo, fleet: Iterable[NodeInfo]) -> None:
    """Raise `HandshakeRefused` when a node of the other role could not exchange KV with this one."""
    for other in fleet:
        prefill, decode = (info, other) if info.role is Role.PREFILL else (other, info)
        if other.role is not info.role and not _shared(prefill, decode):
            raise HandshakeRefused(
                f"node {info.node_id} does not fit the fleet: wire: {_names(other)} at {other.node_id}, "
                f"{_names(info)} at the node"
            )


def _shared(prefill: NodeInfo, decode: NodeInfo) -> set[str]:
    return {one.wire for one in prefill.wires} & {one.wire for one in decode.wires}


def _names(info: NodeInfo) -> str:
    return ", ".join(repr(one.wire) for one in info.wires) or "none"
