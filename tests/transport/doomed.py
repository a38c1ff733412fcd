"""An end of a link in a process that dies at a step of its first parcel, or never.

`python -m tests.transport.doomed LINK STEP [ADDRESS]`: with an address the process sends there. Without one it prints
its own address and receives.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

from hackkv.types import Payload
from tests.transport import nouns
from tests.transport.ends import Reader, listening, sending
from tests.wires import EVERY_LINK
from transport.link import Exchange, Link


class Doomed:
    """A link that kills its process at a step."""

    def __init__(self, link: Link, step: str) -> None:
        self._link, self._step = link, step

    def connect(self, exchange: Exchange) -> None:
        self._link.connect(exchange)

    def post(self, size: int) -> Callable[[], Payload]:
        self._reach("before")
        arrived = self._link.post(size)

        def wait() -> Payload:
            self._reach("in")
            payload = arrived()
            self._reach("after")
            return payload

        return wait

    def send(self, payload: Payload) -> None:
        self._reach("before")
        self._link.send(payload)
        self._reach("after")

    def abort(self) -> None:
        self._link.abort()

    def _reach(self, step: str) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(name: str, step: str, address: str = "") -> None:
    """Run one end."""
    kind = EVERY_LINK[name]()
    doomed = replace(kind, open=lambda rank, host: Doomed(kind.open(rank, host), step))
    if address:
        async with sending(doomed) as sender:
            await sender.push(address, nouns.handoff(), nouns.frames(3, bytes(8 << 20)))
    else:
        async with listening(doomed, Reader()) as here:
            print(here, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
