"""The router's side of `router.api.parser`: one process that forks, and the jobs that it has.

A job is over when its answer is here or its caller is cancelled. Its child ends in both cases.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from array import array
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any, Final, TypeVar

from hackkv.errors import Unavailable
from router.api.parser import IDS, Job, error_of, job_head
from router.api.strict import Prompted
from router.api.tokenize import Parsed
from router.packets import pack, read_packet

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=Prompted)

_SLICE: Final = 1 << 18
"""Bytes that are written at once; others run in between."""
_STOP_S: Final = 5.0


class Parsers:
    """Parses bodies in child processes. The process that forks them starts with the first job, or with `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self.jobs = 0
        """Children at work."""

    @property
    def pid(self) -> int:
        """The process that forks. Raises `Unavailable` while there is none."""
        if self._process is None:
            raise Unavailable("no parser process runs")
        return self._process.pid

    async def start(self) -> None:
        """Start the process that forks, unless it runs. It takes a second or two; jobs may be sent to it meanwhile."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._process is not None:
                log.error("the parser process ended with code %s; it is started again", self._process.returncode)
            self._close_control()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "router.api.parser", str(self._folder), stdin=theirs.fileno()
                )
            ours.setblocking(False)
            self._control = ours

    async def parse(self, kind: type[BodyT], data: bytes, job: Job) -> Parsed[BodyT]:
        """What `validate` and `tokenize` make of a body. Raises what they raise, and `Unavailable`."""
        return _parsed(kind, *await self._do(data, job))

    async def answer(self, data: bytes, job: Job) -> bytes:
        """What `validate` and `answer_question` make of a body. Raises what they raise, and `Unavailable`."""
        return (await self._do(data, job))[1]

    async def _do(self, data: bytes, job: Job) -> tuple[dict[str, Any], bytes]:
        """A child's answer. Raises the error that it told."""
        await self.start()
        ours, theirs = socket.socketpair()
        self.jobs += 1
        try:
            with theirs:
                self._hand_over(theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                told, answer = await _ask(reader, writer, job, data)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                raise Unavailable("the process that parsed this body ended") from error
            finally:
                writer.transport.abort()
        finally:
            ours.close()
            self.jobs -= 1
        if failure := told.get("error"):
            raise error_of(failure)
        return told, answer

    async def close(self) -> None:
        """End the process and its children."""
        self._close_control()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _hand_over(self, theirs: socket.socket) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"j"], [theirs.fileno()])
        except OSError as error:
            raise Unavailable(f"the parser process takes no jobs: {error.strerror}") from error

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job: Job, data: bytes
) -> tuple[dict[str, Any], bytes]:
    """Send a job and read its answer."""
    writer.write(pack(job_head(job), data))
    view = memoryview(data)
    for start in range(0, len(view), _SLICE):
        writer.write(view[start : start + _SLICE])
        await writer.drain()
    return await read_packet(reader)


def _parsed(kind: type[BodyT], told: dict[str, Any], ids: bytes) -> Parsed[BodyT]:
    """A body and its prompts, as a child told them."""
    numbers, prompts = array(IDS, ids), []
    for length in told["lengths"]:
        prompts.append(tuple(numbers[:length]))
        del numbers[:length]
    return Parsed(kind.model_validate_json(told["rest"]), prompts)
