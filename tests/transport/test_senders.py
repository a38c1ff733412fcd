"""A node's wires together: the address names the wire, and a node hears before its start which it may not use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from hackkv.config import InternalConfig
from hackkv.errors import ConfigError, HandshakeRefused
from hackkv.nodes import WireAddress
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from tests.transport import nouns
from tests.wires import LINKS_HERE, USABLE
from transport.rpc_server import RpcServer
from transport.wires import DEFAULT_WIRE, WIRES, Listeners, Site, check_machine, check_wires, open_senders


async def deliver(handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
    items = [item async for item in frames]
    return nouns.receipt(handoff.transfer_id, tokens=len(items))


async def test_a_node_with_every_wire_sends_by_each_to_the_address_that_was_announced() -> None:
    async with RpcServer("127.0.0.1", 0) as server:
        site = Site(server)
        listeners, senders = Listeners(USABLE, site), open_senders(USABLE, site)
        announced = await listeners.serve(deliver)
        assert [one.wire for one in announced] == USABLE
        for one in announced:
            receipt = await senders.push(one.url, nouns.handoff(), nouns.frames(3))
            assert receipt == nouns.receipt(tokens=4)
        await senders.close()
        await listeners.close()


@pytest.mark.parametrize("address", ["fast://somewhere", "127.0.0.1:1", ""])
async def test_an_address_on_another_wire_is_refused_and_the_frames_are_closed(address: str) -> None:
    async with RpcServer("127.0.0.1", 0) as server:
        senders = open_senders([DEFAULT_WIRE], Site(server))
        frames = nouns.frames(1)
        with pytest.raises(HandshakeRefused, match=DEFAULT_WIRE):
            await senders.push(address, nouns.handoff(), frames)
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
        assert senders.wires == (WireAddress(DEFAULT_WIRE, ""),)
        await senders.close()


def test_wires_that_stay_within_a_process_are_not_for_nodes() -> None:
    usable = [name for name, wire in WIRES.items() if wire.leaves_process]
    assert DEFAULT_WIRE in usable
    check_wires(usable)


@pytest.mark.parametrize("name", LINKS_HERE)
def test_a_link_leaves_the_machine_only_over_a_network_that_is_trusted(name: str, tmp_path: Path) -> None:
    """A token or TLS does not help: the sockets of links use neither."""
    secret = InternalConfig(token_file=tmp_path / "token")
    check_machine([DEFAULT_WIRE, name], "127.0.0.1", InternalConfig())
    check_machine([DEFAULT_WIRE], "10.0.0.1", secret)
    check_machine([name], "10.0.0.1", InternalConfig(open=True))
    with pytest.raises(ConfigError, match=rf"^wire: {name}: .* internal\.open: true .* or take {DEFAULT_WIRE}$"):
        check_machine([name], "10.0.0.1", secret)


@pytest.mark.parametrize(
    ("names", "said"), [(["inproc"], "'inproc'"), (["grpc", "telegraph"], "'telegraph'"), ([], "none")]
)
def test_settings_that_no_node_can_use_are_refused_by_name(names: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"wire: {said}: nodes can use .*grpc"):
        check_wires(names)
