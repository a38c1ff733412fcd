"""Prompts on the replica that also decodes: the live prefill scheduler gives out chunks, each beside a decode step.

Every prompt has its pages since its request was admitted, so the book of this scheduler never runs short.
"""

from __future__ import annotations

from collections.abc import Callable

from hackkv.timing import Stage
from prefill_node.host_pool import HostPool
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from sim.books import CountedPrefixes
from sim.costs import CostModel
from sim.eventlog import EventKind
from sim.jobs import Job
from sim.world import World

_PLENTY = 1 << 40


class InterleavedPrompts:
    """See `sim.decode.Beside`. `on_complete` is called with every job whose prompt is computed."""

    def __init__(self, world: World, number: int, cost: CostModel, chunk_tokens: int, max_sequences: int) -> None:
        self.on_complete: Callable[[Job], None] = lambda _: None
        self.tokens = 0
        self._world, self._number, self._cost = world, number, cost
        host = HostPool(0, lambda _: None)
        book = CountedPrefixes(_PLENTY, max_sequences, world.footprint.page_tokens, host, 1)
        self._scheduler: PrefillScheduler[Job] = PrefillScheduler(book, chunk_tokens)
        self._chunks: list[Chunk[Job]] = []

    def join(self, job: Job) -> None:
        """Compute a prompt."""
        job.times.enter(Stage.PREFILL_QUEUE, self._world.now)
        self._scheduler.add(Prompt(job, job.arrival.prompt_tokens))

    def begin(self) -> float:
        """See `Beside`."""
        self._chunks = self._scheduler.schedule()
        if not self._chunks:
            return 0.0
        cost = self._cost.prefill([(chunk.start, chunk.count) for chunk in self._chunks])
        for chunk in self._chunks:
            chunk.prompt.owner.times.enter(Stage.PREFILL, self._world.now)
            chunk.prompt.owner.account.quantize_s += cost.quantize_s
        return cost.seconds

    def end(self) -> None:
        """See `Beside`."""
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return
        self._scheduler.commit()
        tokens = sum(chunk.count for chunk in chunks)
        self.tokens += tokens
        self._world.log.add(self._world.now, EventKind.PASS, self._number, tokens)
        for chunk in chunks:
            if chunk.is_last:
                self._world.log.add(self._world.now, EventKind.FIRST_TOKEN, self._number, chunk.prompt.owner.number)
                self.on_complete(chunk.prompt.owner)
