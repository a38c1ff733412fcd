"""Starts and ends the processes of a cluster: the client side of `app.forkserver`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NoReturn

from app.interrupt import SIGNALS, Interrupt
from app.roles import ENVIRONMENT
from hackkv.errors import ConfigError, HackkvError, NodeLost
from node.children import Child, keep_only, may_fork

MAX_ANSWER: Final = 1 << 16
"""The most bytes of an answer."""
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
"""Options of Linux's prctl."""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While the context is open, orphaned grandchildren become children of this process (Linux: child subreaper)."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before))
    if libc.prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


class Forked(Child):
    """A forked role: a child of this process, although the fork server forked it."""

    def __init__(self, pid: int, stdin: int, stdout: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        """`stdin` is the writing end of the child's standard input, `pipe` the reading end of its standard output."""
        super().__init__(pid, self.close_stdin)
        self.stdout, self._pipe = stdout, pipe
        self._stdin: int | None = stdin

    def order(self, arguments: Sequence[str]) -> None:
        """Send the child the arguments for which it waits."""
        if self._stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # `wait` reports the end of the child
                os.write(self._stdin, json.dumps(list(arguments)).encode() + b"\n")

    def close_stdin(self) -> None:
        """Close the child's standard input, at which it ends."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def end(self) -> None:
        """Send SIGKILL if the child still runs. Output that nobody has read is lost."""
        self.kill()
        await self.wait()
        self._pipe.close()


@dataclass(frozen=True, slots=True)
class UnattachedServer:
    """A fork server without an event loop yet. It ends when `channel` is closed."""

    pid: int
    channel: socket.socket


def fork_server() -> UnattachedServer | None:
    """Fork this process into a fork server. It begins at once, and shares the modules that are imported here.

    The caller must have read no more than its command line: no event loop, and no library that reads `ENVIRONMENT` when
    it is loaded. Returns None if there are threads, as under a debugger. Then the fork server must be a new Python
    (`ForkServerClient.start`).
    """
    if not may_fork():
        return None
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes would write buffered output
    gc.collect()
    gc.freeze()  # a collection would write to shared pages
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if not pid:
        _become_fork_server(far)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    far.close()
    near.setblocking(False)
    return UnattachedServer(pid, near)


def _become_fork_server(channel: socket.socket) -> NoReturn:
    """Be the fork server to its end. `os._exit` skips the exit handlers of the command."""
    code = 1
    try:
        os.setsid()  # Ctrl-C reaches the command alone
        Interrupt.forget()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        keep_only(channel.fileno())
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nothing, standard)
        os.close(nothing)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import_module("app.forkserver").main(channel)
        code = 0
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


class ForkServerClient:
    """A fork server and the socket to it. `of` and `start` make one; `close` ends it."""

    def __init__(self, process: Process | Child, channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    def of(cls, begun: UnattachedServer) -> ForkServerClient:
        """The client of a fork server that runs."""
        return cls(Child(begun.pid), begun.channel)

    @classmethod
    async def start(cls) -> ForkServerClient:
        """Start a fork server that shares nothing with this process. It has a session of its own, so Ctrl-C reaches
        only this process, which ends the others."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            near.setblocking(False)
            # -P keeps modules of the current directory out.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "app.forkserver", str(far.fileno())),
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=[far.fileno()],
                env={**ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        return cls(process, near)

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the fork server runs."""
        return self._process.returncode is None

    async def fork(self, role: str, name: str, loss: dict[str, Any] | None = None) -> Forked:
        """Start a role, which waits for its arguments. `loss` is a `CodecLoss` as a dictionary, for nodes."""
        theirs_in, stdin = os.pipe()
        stdout, theirs_out = os.pipe()
        try:
            answer = await self._ask({"fork": role, "name": name, "loss": loss}, [theirs_in, theirs_out])
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        return Forked(answer["pid"], stdin, *await _reader(stdout))

    async def load(self, model: dict[str, Any], codec: dict[str, Any]) -> None:
        """Load the model that nodes share. Raises `ConfigError`, or `HackkvError` for another fault."""
        answer = await self._ask({"load": {"model": model, "codec": codec}})
        if "failed" in answer:
            raise failure(answer)

    async def close(self) -> None:
        """End the fork server, whatever it does. It holds nothing that has to be saved."""
        self._channel.close()
        if self.alive:
            self._process.kill()
        await self._process.wait()

    async def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        async with self._one_at_a_time:
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], fds)
                packet = await asyncio.get_running_loop().sock_recv(self._channel, MAX_ANSWER)
            except ConnectionError:
                packet = b""
        if not packet:
            raise NodeLost(f"the fork server ended with exit code {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(packet)
        return answer


def failure(message: dict[str, Any]) -> HackkvError:
    """The error that another process has reported."""
    return (ConfigError if message["setting"] else HackkvError)(message["failed"])


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", buffering=0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport
