"""Links between processes: bytes that one sends arrive at the other, in either direction."""

from __future__ import annotations

import pytest

from hackkv.types import KvFrame
from tests.transport import nouns
from tests.transport.ends import Reader, listening, sending
from tests.transport.test_dead_peers import PARCEL, start
from tests.wires import EVERY_LINK

pytestmark = pytest.mark.parametrize("name", EVERY_LINK)


async def test_a_process_receives_what_another_sends(name: str) -> None:
    reader = Reader()
    async with listening(EVERY_LINK[name](), reader) as address:
        child = await start(name, "never", address)
        assert await child.wait() == 0
    assert [bytes(item.payload) for item in reader.items if isinstance(item, KvFrame)] == [PARCEL] * 3


@pytest.mark.slow
async def test_a_process_sends_what_another_receives(name: str) -> None:
    child = await start(name, "never")
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    async with sending(EVERY_LINK[name]()) as sender:
        for push in ("t-1", "t-2"):
            frames = nouns.frames(3, PARCEL, transfer_id=push)
            assert (await sender.push(address, nouns.handoff(push), frames)).tokens >= 4
    child.kill()
    await child.wait()
