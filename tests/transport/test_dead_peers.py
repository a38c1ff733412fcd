"""A process dies before, in or after a parcel. Its peer gets an error that names it, and goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from hackkv.errors import NodeLost
from tests.transport import fake_nccl, nouns
from tests.transport.ends import Reader, listening, sending
from tests.wires import EVERY_LINK

ROOT = Path(__file__).parents[2]
PARCEL = bytes(8 << 20)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", EVERY_LINK)]


async def start(*arguments: str, ahead: str = "") -> Process:
    """Start a doomed process. `ahead` is a library that is preloaded; the process then sends over sockets alone."""
    command = (sys.executable, "-m", "tests.transport.doomed", *arguments)
    env = {**os.environ, **({"LD_PRELOAD": ahead, "UCX_TLS": "tcp"} if ahead else {})}
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT, env=env)


@pytest.mark.parametrize("step", ["before", "in", "after"])
async def test_a_receiver_that_dies_is_a_lost_node(name: str, step: str) -> None:
    kind, child = EVERY_LINK[name](), await start(name, step)
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    async with sending(kind) as sender, listening(kind, Reader()) as elsewhere:
        with pytest.raises(NodeLost):
            await sender.push(address, nouns.handoff(), nouns.frames(3, PARCEL))
        assert await child.wait() < 0
        with pytest.raises(NodeLost, match=address):
            await sender.push(address, nouns.handoff(), nouns.frames(3, PARCEL))
        assert (await sender.push(elsewhere, nouns.handoff(), nouns.frames(3, PARCEL))).tokens == 4


@pytest.mark.parametrize("step", ["before", "in", "after"])
async def test_a_sender_that_dies_is_a_lost_node(name: str, step: str, tmp_path: Path) -> None:
    """For a death in a parcel, a preloaded library ends the process after at most 1 MiB of it."""
    kind, reader, ahead = EVERY_LINK[name](), Reader(), ""
    if step == "in":
        if not shutil.which("cc"):
            pytest.skip("no C compiler")
        source = Path(__file__).with_name("die_sending.c")
        ahead = str(fake_nccl.built_from(source, tmp_path / "die_sending.so"))
    async with listening(kind, reader) as address:
        child = await start(name, step, address, ahead=ahead)
        await reader.over.wait()
        assert isinstance(reader.error, NodeLost)
        assert await child.wait() < 0
        assert step == "after" or not reader.items
        async with sending(kind) as sender:
            assert (await sender.push(address, nouns.handoff(), nouns.frames(3, PARCEL))).tokens >= 4
