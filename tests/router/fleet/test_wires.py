"""The wire that two nodes share is named to the prefill node. A node that shares none is refused with the reason."""

from __future__ import annotations

import pytest

from hackkv.errors import HandshakeRefused, NodeLost
from hackkv.nodes import NodeInfo, WireAddress
from hackkv.types import Role
from router.fleet.wires import kv_address
from tests.router.scripted import Cluster, info


def node(role: Role, *wires: str, node_id: str = "") -> NodeInfo:
    return info(role, node_id, wires=tuple(WireAddress(wire, f"{wire}-place") for wire in wires))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (("grpc",), ("grpc",), "grpc://grpc-place"),
        (("fast", "grpc"), ("grpc", "fast"), "fast://fast-place"),
        (("fast", "grpc"), ("grpc",), "grpc://grpc-place"),
    ],
)
def test_kv_takes_the_first_of_the_senders_wires_that_the_receiver_has(
    prefill: tuple[str, ...], decode: tuple[str, ...], expected: str
) -> None:
    assert kv_address(node(Role.PREFILL, *prefill), node(Role.DECODE, *decode)) == expected


def test_nodes_that_came_apart_since_they_joined_are_lost_to_each_other() -> None:
    with pytest.raises(NodeLost, match=r"share no wire: 'fast' and none"):
        kv_address(node(Role.PREFILL, "fast"), node(Role.DECODE))


@pytest.mark.parametrize(("role", "name"), [(Role.PREFILL, "p1"), (Role.DECODE, "d1")])
async def test_a_node_without_a_common_wire_does_not_join(role: Role, name: str) -> None:
    cluster = Cluster()
    for first in ("p0", "d0"):
        await cluster.report(first)
    refusal = rf"node {name} does not fit the fleet: wire: 'inproc' at [pd]0, 'fast' at the node"
    with pytest.raises(HandshakeRefused, match=refusal):
        await cluster.fleet.nodes.register(node(role, "fast", node_id=name))
    await cluster.fleet.nodes.register(node(role, "fast", "inproc", node_id=name))


async def test_the_first_nodes_of_a_fleet_choose_its_wires() -> None:
    cluster = Cluster()
    await cluster.fleet.nodes.register(node(Role.PREFILL, "fast", node_id="p0"))
    await cluster.fleet.nodes.register(node(Role.DECODE, "fast", node_id="d0"))


def test_a_wire_on_the_port_that_the_router_dials_moves_with_it() -> None:
    wires = (WireAddress("grpc", "inside:1"), WireAddress("fast", "elsewhere"))
    seen = info(Role.DECODE, address="inside:1", wires=wires).reached_at("outside:9")
    assert (seen.address, seen.wires) == ("outside:9", (WireAddress("grpc", "outside:9"), wires[1]))
