"""Memory that a process holds and does not need: what the C library keeps of freed memory, and code that has run."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from time import process_time
from typing import Final

REST_S: Final = 1.0
"""Seconds without work after which a process gives back the memory that only work needs."""
LOOK_S: Final = 1.0
"""Seconds between two looks at the processor time of this process."""
IDLE_S: Final = 0.05
"""A process that took less processor time than this from look to look is idle."""
_ARENA_MAX: Final = -8
"""M_ARENA_MAX of glibc's malloc.h."""
_AREA: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")


def keep_one_heap() -> None:
    """Let all threads of this process allocate from one heap, before it has a second thread. Only glibc has several.

    `trim` does not shrink the ends of glibc's other heaps: a thread that had allocated the tensors of a pass kept up to
    5 MiB. Threads here take turns at Python's lock, so one heap holds nobody up.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def trim() -> None:
    """Give freed memory back to the system. Only glibc keeps it; elsewhere nothing happens.

    Reading a tokenizer or a checkpoint frees many small pieces at once. A process that goes on for days asks for this
    when it has loaded what it needs.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def unmap_code() -> None:
    """Give up the touched pages of program files and libraries. For a process that hardly runs again.

    A page that is needed again comes from the system's cache of files. Written pages stay, such as those with
    addresses that the loader has filled in. Linux only; elsewhere nothing happens. No other thread may map or unmap
    memory meanwhile.
    """
    maps = Path("/proc/self/smaps")
    if not maps.is_file():
        return
    libc = ctypes.CDLL(None)
    with maps.open(encoding="utf-8", errors="replace") as lines:
        areas = list(unwritten_files(lines))
    for begin, end in areas:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def unwritten_files(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """The areas (begin, end) of `/proc/PID/smaps` that are mapped from a file, can't be written and hold no page that
    differs from the file."""
    area: tuple[int, int] | None = None
    for line in smaps:
        if head := _AREA.match(line):
            begin, end, may, path = head.groups()
            area = (int(begin, 16), int(end, 16)) if path.startswith("/") and "w" not in may else None
        elif area and line.startswith("Anonymous:"):
            if line.split()[1] == "0":
                yield area
            area = None


async def within(seconds: float, event: Awaitable[object]) -> bool:
    """Wait for `event`; False if it has not come after so long."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        return False
    return True


class IdleTrim:
    """Trims once when a process has become idle, so that the next request pays for it only after a pause."""

    def __init__(self, trim: Callable[[], None] = trim, used_s: Callable[[], float] = process_time) -> None:
        """`used_s` tells the processor time of this process, in seconds."""
        self._trim, self._used_s = trim, used_s
        self._seen, self._worked = used_s(), True

    async def run(self) -> None:
        """`look` every `LOOK_S` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Trim, in a thread, if the process has been idle since the last look and worked before that."""
        used = self._used_s()
        idle, self._seen = used - self._seen < IDLE_S, used
        if idle and self._worked:
            await asyncio.to_thread(self._trim)
            self._seen = self._used_s()
        self._worked = not idle
