"""The socket between the leader and a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hackkv.errors import Unavailable
from router.packets import pack
from router.workers import link as link_module
from router.workers.link import WorkerLink

PATIENCE_S = 240.0


class End:
    """One end of a link, and the messages that it heard."""

    def __init__(self, link: WorkerLink) -> None:
        self.link, self.heard = link, list[tuple[str, Any, bytes]]()
        self.silent = asyncio.Event()
        self.running = asyncio.create_task(link.run(self._hear, self._answer))

    async def _hear(self, subject: str, value: Any, data: bytes) -> None:
        self.heard.append((subject, value, data))

    async def _answer(self, subject: str, value: Any) -> Any:
        if subject == "silence":
            await self.silent.wait()
        return [subject, value, len(self.heard)]


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    """Two ends of one link."""
    ends = [End(await WorkerLink.over(one)) for one in socket.socketpair()]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.link.close()
            await end.running


async def test_both_tell_and_ask_and_are_heard_in_order() -> None:
    async with pair() as ends:
        for one, other in (ends, ends[::-1]):
            one.link.tell("node", data=b"\x00\xff")
            one.link.tell("report", {"a": [1, 2]})
            assert await one.link.ask("live", 7, PATIENCE_S) == ["live", 7, 2], "what was told first was heard first"
            assert other.heard == [("node", None, b"\x00\xff"), ("report", {"a": [1, 2]}, b"")]


async def test_a_slow_answer_holds_up_no_other() -> None:
    async with pair() as (one, other):
        slow = asyncio.create_task(one.link.ask("silence", 1, PATIENCE_S))
        assert await one.link.ask("live", 2, PATIENCE_S) == ["live", 2, 0]
        assert not slow.done()
        other.silent.set()
        assert await slow == ["silence", 1, 0]


async def test_questions_fail_when_nobody_answers() -> None:
    async with pair() as (one, other):
        with pytest.raises(Unavailable, match="does not answer"):
            await one.link.ask("silence", None, 0)
        asked = asyncio.create_task(one.link.ask("silence", None, PATIENCE_S))
        await one.link.ask("live", None, PATIENCE_S)
        other.link.close()
        with pytest.raises(Unavailable, match="has ended"):
            await asked
        await one.running
        with pytest.raises(Unavailable, match="has ended"):
            await one.link.ask("live", None, PATIENCE_S)
        one.link.tell("report")  # the other end is gone


async def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_UNREAD", 1 << 20)
    near, far = socket.socketpair()
    with far:
        end = End(await WorkerLink.over(near))
        for _ in range(100):
            end.link.tell("report", "x" * (1 << 16))
        await end.running


async def test_a_message_beyond_all_bounds_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_MESSAGE", 1 << 10)
    near, far = socket.socketpair()
    with far:
        end = End(await WorkerLink.over(near))
        far.sendall(pack({"tell": "x" * (1 << 11), "value": None}))
        with pytest.raises(Unavailable, match="at most 1024"):
            await end.running
