"""Child processes that this process forks itself, without a library."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")
"""The folder in which Linux lists the threads of this process."""
_NAME_BYTES: Final = 15
"""The most bytes of a process name that Linux keeps."""


def may_fork() -> bool:
    """Whether this process has only one thread. A fork would lack other threads, but keep locks that they hold."""
    return _TASKS.is_dir() and len(list(_TASKS.iterdir())) == 1


def call_me(name: str) -> None:
    """Give this process the name that `ps` and `top` show."""
    Path("/proc/self/comm").write_bytes(name.encode()[:_NAME_BYTES])


def keep_only(descriptor: int) -> None:
    """Close all descriptors that a fork has inherited, except the standard streams and `descriptor`."""
    os.closerange(sys.stderr.fileno() + 1, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


class Child:
    """A child of this process; the running loop reaps it. The interface is that of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called when the child has ended."""
        self.pid, self._on_end = pid, on_end
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self._reap, loop)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the child runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait until the child has ended; return the exit code."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Send SIGTERM if the child still runs."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL if the child still runs."""
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, signum)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._on_end()
        self._ended.set_result(os.waitstatus_to_exitcode(status))
