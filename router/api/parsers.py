"""The router's side of `router.api.parser`: one process that forks, and the jobs that it has.

A job is over when its answer is here or its caller is cancelled. Its child ends in both cases.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from array import array
from asyncio.subprocess import Process
from typing import Any, Final, NoReturn, TypeVar

from hackkv.errors import Unavailable
from hackkv.heap import trim
from hackkv.tokenizer import Tokenizer
from node.children import Child, call_me, keep_only, may_fork
from router.api.parser import IDS, ParseJob, error_of, job_head, main
from router.api.strict import Data, Prompted
from router.api.tokenize import Parsed
from router.packets import pack, read_packet

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=Prompted)

_SLICE: Final = 1 << 18
"""Bytes that are written at once; others run in between."""
_IDS_AT_ONCE: Final = 1 << 16
"""Token ids that become numbers at once; others run in between."""
_STOP_S: Final = 5.0


class Parsers:
    """Parses bodies in child processes. The process that forks them comes from `fork`, or starts with the first job."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: Process | Child | None = None
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

    def fork(self) -> bool:
        """Fork the process that forks, with all that this one holds: it takes a moment, and next to no memory.

        Returns whether that is possible, which is before this process has a second thread.
        """
        if not may_fork():
            return False
        ours, theirs = socket.socketpair()
        trim()
        gc.freeze()  # a collection would write to what is shared
        pid = os.fork()
        if not pid:
            ours.close()
            _become_parser(self._tokenizer, theirs)
        theirs.close()
        self._process = Child(pid)
        self._take(ours)
        return True

    async def start(self) -> None:
        """Start the process that forks, unless it runs. It takes a second or two; jobs may be sent to it meanwhile."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._process is not None:
                log.error("the parser process ended with code %s; it is started again", self._process.returncode)
            self._close_control()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "router.api.parser", str(self._tokenizer.folder), stdin=theirs.fileno()
                    )
            except BaseException:  # whoever asked for it first may leave meanwhile
                ours.close()
                raise
            self._take(ours)

    async def parse(self, kind: type[BodyT], data: Data, job: ParseJob) -> Parsed[BodyT]:
        """Validate and tokenize a body, as `validate` and `tokenize` do. Raises what they raise, and `Unavailable`."""
        return await _parsed(kind, *await self._do(data, job))

    async def answer(self, data: Data, job: ParseJob) -> bytes:
        """Answer a question, as `validate` and `answer_question` do. Raises what they raise, and `Unavailable`."""
        return (await self._do(data, job))[1]

    async def _do(self, data: Data, job: ParseJob) -> tuple[dict[str, Any], bytes]:
        """A child's answer. Raises the error that the child reported."""
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

    def _take(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _become_parser(tokenizer: Tokenizer, control: socket.socket) -> NoReturn:
    """Be the process that forks, to its end. The copies of the event loop and its sockets belong to the router: they
    must be neither used nor kept open."""
    code = 1
    try:
        call_me("parser")
        keep_only(control.fileno())
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = main(tokenizer, control)
    finally:
        os._exit(code)


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job: ParseJob, data: Data
) -> tuple[dict[str, Any], bytes]:
    """Send a job and read its answer."""
    writer.write(pack(job_head(job), data))
    view = memoryview(data)
    for start in range(0, len(view), _SLICE):
        writer.write(view[start : start + _SLICE])
        await writer.drain()
    return await read_packet(reader)


async def _parsed(kind: type[BodyT], told: dict[str, Any], ids: bytes) -> Parsed[BodyT]:
    """A body and its prompts, as a child told them. Others run while a long prompt is read."""
    body = kind.model_validate_json(told["rest"])
    numbers, prompts, end = array(IDS, ids), [], 0
    for length in told["lengths"]:
        prompt, end = list[int](), end + length
        for start in range(end - length, end, _IDS_AT_ONCE):
            prompt.extend(numbers[start : min(start + _IDS_AT_ONCE, end)])
            if len(prompt) % _IDS_AT_ONCE == 0:
                await asyncio.sleep(0)
        prompts.append(tuple(prompt))
    return Parsed(body, prompts)
