"""Compiles kernels before they are launched, many at a time.

Triton compiles a kernel when it is launched for the first time, which takes a second or more. A node needs dozens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout
from triton import AsyncCompileMode, knobs

from hack_kernels.compiler import OnKernel
from hack_kernels.triton.launch import Launch, instead_of_launching
from hack_kernels.triton.split import block_sizes

MOST_THREADS: Final = 16
"""Each takes up to some hundred MiB."""
LOCK_S: Final = 600.0
"""Seconds to wait for another process that compiles."""


class TritonCompiler:
    """Implements `Compiler`: Triton's passes in threads, which hold Python's lock only while they parse a kernel."""

    def batches(self, most: int) -> Sequence[int]:
        """One of each `batch_block`."""
        return block_sizes(most)

    @contextmanager
    def compiling(self, on_kernel: OnKernel) -> Iterator[list[Any]]:
        """See `Compiler`. Yields the kernels of all launches, in their order.

        Processes that share Triton's cache take turns: the first compiles on all cores, the next find what it made.
        """
        compiled = list[Any]()

        def compile_only(launch: Launch) -> None:
            compiled.append(launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options))

        with ExitStack() as stack:
            stack.enter_context(_turn())
            pool = stack.enter_context(_CountingPool(on_kernel))
            stack.enter_context(AsyncCompileMode(pool))
            stack.enter_context(instead_of_launching(compile_only))
            yield compiled


class _CountingPool(ThreadPoolExecutor):
    """Threads that tell how many kernels are compiled, and of how many."""

    def __init__(self, on_kernel: OnKernel) -> None:
        super().__init__(min(MOST_THREADS, len(os.sched_getaffinity(0))), "compile")
        self._on_kernel, self._tasks = on_kernel, list[Future[Any]]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = super().submit(fn, *args, **kwargs)
        self._tasks.append(task)
        task.add_done_callback(self._tell)
        return task

    def _tell(self, _: Future[Any]) -> None:
        self._on_kernel(sum(task.done() for task in self._tasks), len(self._tasks))


@contextmanager
def _turn() -> Iterator[None]:
    """Hold the lock of Triton's cache, to save work. A cache that cannot be written to has none, and a lock that was
    held for `LOCK_S` is no longer waited for."""
    folder = Path(knobs.cache.dir)
    lock = FileLock(folder / "hackkv.lock")
    with suppress(OSError, Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_S)
    try:
        yield
    finally:
        lock.release()
