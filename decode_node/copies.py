"""Copies to host memory and back while steps run: sequences that a plan swaps, pages that no sequence holds, and the
exact rows of sequences that end.

Each copy has a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from time import perf_counter
from typing import Any, Final, TypeVar

from decode_node.kept_pages import Copy
from decode_node.kept_rows import KeptRows
from decode_node.pages import Grant
from decode_node.scheduler import DecodeScheduler
from decode_node.seats import Plan, Seat
from decode_node.stream import Stream
from decode_node.swap import Swapper
from hackkv.errors import HackkvError, TransferError
from hackkv.kv_memory import HostKv, KvMemory
from hackkv.page_names import PageName
from hackkv.types import Swapped

log = logging.getLogger(__name__)

T = TypeVar("T")

ExactRows = HostKv | asyncio.Task[HostKv | None] | None
"""The exact rows of the pages with which a sequence begins, or the copy of them that is under way, or None."""

EMPTY_SHARE: Final = 1 / 2
"""Share of all pages. While at least as many are empty, idle pages need no copy in host memory. Each page is copied
once, so copying early costs little more than copying late, and a burst of prompts drops few pages."""
SAVED_AT_ONCE: Final = 64
"""Pages of one copy. The limit is low because a sequence to be swapped waits for the copy."""


class Copies:
    """Runs copies until `close`. Belongs to the event loop's thread; the bytes move on the swapper's."""

    def __init__(
        self,
        memory: KvMemory,
        scheduler: DecodeScheduler[Stream],
        fail: Callable[[Stream, HackkvError], None],
        on_copied: Callable[[], None],
        rows: KeptRows,
    ) -> None:
        """`fail` ends a sequence whose copy failed. `on_copied` is called after a copy: the scheduler may plan anew."""
        self._footprint = memory.footprint
        self._swapper = Swapper(memory, scheduler.pool.kept.host_places)
        self._scheduler, self._rows = scheduler, rows
        self._saving = self._closing = False
        self._fail = fail
        self._on_copied = on_copied
        self._running: set[asyncio.Task[Any]] = set()
        self._keeping: dict[PageName, asyncio.Task[HostKv | None]] = {}
        """Copies of exact rows under way."""
        self.counts: Counter[str] = Counter()
        """The numbers of finished copies: swap_out, swap_in."""
        self.swapped_s = 0.0
        """Seconds that sequences were swapped out, summed over those that came back."""

    def start(self, plan: Plan[Stream]) -> None:
        """Start a plan's copies. Each gets its grant and KV now: the sequence may leave before the task runs."""
        for seat in plan.leaving:
            self._run(self._swap_out(seat, seat.held_grant))
        for seat in plan.returning:
            self._run(self._swap_in(seat, seat.held_grant, seat.owner.kv))

    def save_idle(self) -> None:
        """When empty pages run short, copy idle pages to host memory, in the order of their eviction."""
        pool = self._scheduler.pool
        if self._saving or self._closing or pool.empty_pages >= EMPTY_SHARE * pool.num_pages:
            return
        copies = pool.kept.to_save(SAVED_AT_ONCE)
        if copies:
            self._saving = True
            self._run(self._save(copies))

    def rows_after(self, name: PageName) -> ExactRows:
        """The exact rows with which a prompt goes on after page `name`, if they are kept or being copied."""
        return self._rows.of(name) or self._keeping.get(name)

    def load(self, seat: Seat[Stream], exact: ExactRows = None) -> asyncio.Task[bool] | None:
        """Bring back the pages of a new sequence that are only in host memory, and the `exact` rows of the pages that
        it holds. Returns None if there are neither. The task says whether the copies worked."""
        grant = seat.held_grant
        if not grant.loads and exact is None:
            return None
        seat.loading = True
        return self._run(self._load(seat, grant, exact))

    def keep_rows(self, stream: Stream) -> None:
        """Copy the exact rows of a sequence that leaves, if its last sealed page has a name. It must be in no step."""
        names = stream.names.of(stream.seat.rows) if stream.names is not None and self._rows.most else ()
        if names and names[-1] not in self._rows:
            name, grant = names[-1], stream.seat.held_grant
            self._scheduler.pool.keep_slot(grant)
            self._keeping[name] = self._run(self._keep_rows(name, grant, len(names) * self._footprint.page_tokens))

    def forget_rows(self) -> None:
        """Drop all exact rows, because the contents of slots are in doubt."""
        self._rows.forget()
        self._keeping.clear()

    async def close(self) -> None:
        """Wait for the copies under way; none begins after them."""
        self._closing = True
        if self._running:
            await asyncio.wait(self._running)
        self._swapper.close()

    def _run(self, copy: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(copy)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _save(self, copies: list[Copy]) -> None:
        worked = False
        try:
            await self._swapper.save(copies)
            worked = True
        except Exception:  # for example out of memory: the node goes on without these copies
            log.exception("pages could not be copied to host memory")
        finally:
            self._scheduler.pool.kept.saved(copies, worked=worked)
            self._saving = False
        if worked:
            self.save_idle()

    async def _load(self, seat: Seat[Stream], grant: Grant, exact: ExactRows) -> bool:
        worked, rows = False, seat.rows
        try:
            await self._swapper.load(grant.loads)
            if isinstance(exact, asyncio.Task):
                await asyncio.wait([exact])
                exact = exact.result()
                if exact is None:
                    raise TransferError("exact rows could not be kept")
            if exact is not None:
                await self._swapper.resume(grant, exact, rows)
            worked = True
        except Exception as error:  # the sequence cannot go on; its prompt can be sent again
            log.exception("pages could not be copied from host memory")
            self._fail(seat.owner, TransferError(f"pages are lost: {type(error).__name__}: {error}"))
        finally:
            self._scheduler.loaded(seat, worked=worked)
            self._on_copied()
        return worked

    async def _keep_rows(self, name: PageName, grant: Grant, rows: int) -> HostKv | None:
        kept: HostKv | None = None
        try:
            kept = await self._swapper.out(grant, 0, rows)
            if self._keeping.get(name) is asyncio.current_task():
                self._rows.put(name, kept)
        except Exception:  # for example out of memory: the node goes on without these rows
            log.exception("exact rows could not be copied to host memory")
        finally:
            if self._keeping.get(name) is asyncio.current_task():
                del self._keeping[name]
            self._scheduler.pool.free_slot(grant.slot)
            self._on_copied()
        return kept

    async def _swap_out(self, seat: Seat[Stream], grant: Grant) -> None:
        stream, held = seat.owner, seat.rows
        stream.swapped_at = perf_counter()
        stream.put(Swapped())
        with self._moving(seat):
            stream.kv = await self._swapper.out(grant, self._footprint.sealed(held), held)
            self.counts["swap_out"] += 1

    async def _swap_in(self, seat: Seat[Stream], grant: Grant, kv: HostKv | None) -> None:
        stream = seat.owner
        with self._moving(seat):
            assert kv is not None
            await self._swapper.back(grant, kv)
            stream.kv = None
            self.counts["swap_in"] += 1
            seconds = perf_counter() - stream.swapped_at
            stream.sequence.swapped_s += seconds
            self.swapped_s += seconds

    @contextlib.contextmanager
    def _moving(self, seat: Seat[Stream]) -> Iterator[None]:
        """At the end, tell the scheduler that the copy is over, whether it worked or failed."""
        try:
            yield
        except Exception as error:  # for example out of memory: the node must go on
            log.exception("a swap failed")
            self._fail(seat.owner, HackkvError(f"swap failed: {type(error).__name__}: {error}"))
        finally:
            self._scheduler.copied(seat)
            self._on_copied()
