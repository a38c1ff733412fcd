"""A decode replica in simulated time: the live scheduler over a page book, and steps that take as long as they cost.

**Macro-steps.** While the batch stays the same, the live scheduler would plan the same step again and again. So the
replica runs many steps as one event: until the first sequence ends or pages might run short. When something happens in
between, the replica first catches up: it applies to rows and pages what the steps so far have done. The current step
then ends as planned, and the scheduler plans anew. Results equal those of single steps (`macro` False), up to rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler
from decode_node.seats import Place, Plan, Seat, StepShare, publish
from hackkv.timing import Stage
from sim.costs import CostModel, StepCost, whole_steps
from sim.eventlog import EventKind
from sim.jobs import Job
from sim.world import World

_GAP_STEPS = 100


@dataclass(slots=True, eq=False)
class StepRun:
    """Steps under way, all with the same batch."""

    shares: list[StepShare[Job]]
    began: float
    context: int
    cost: StepCost
    replay_s: float
    """Seconds of the replays and prompts that run beside the steps."""
    steps: int = 0
    seconds: float = 0.0
    """Length of all steps of the run."""
    counted: int = 0
    """Finished steps that rows and pages already reflect."""


@dataclass(slots=True)
class DecodeTally:
    """The work that a replica did."""

    tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    swaps: int = 0
    pages: int = 0
    """Size of the replica's pool."""
    peak_pages: int = 0
    page_seconds: float = 0.0
    gaps: Counter[int] = field(default_factory=Counter)
    """Tokens by the time since the token before, in logarithmic bins of 1% (`gap_of`)."""
    kind: int = 0
    """Index of the replica's pool in `Spec.decode`."""


def _step_of(gap_s: float) -> int:
    return round(_GAP_STEPS * math.log(max(gap_s, 1e-9)))


def gap_of(step: int) -> float:
    """The gap, in seconds, that a key of `DecodeTally.gaps` stands for."""
    return math.exp(step / _GAP_STEPS)


class Beside(Protocol):
    """Work that a replica does in the same pass as a decode step: prompts, where one replica does both roles."""

    def begin(self) -> float:
        """Begin the work that is ready. Returns its seconds; 0 if there is none."""
        ...

    def end(self) -> None:
        """End the work that `begin` began."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """Parts of a replica beside its scheduler."""

    world: World
    cost: CostModel
    max_batch: int
    """The scheduler's largest batch."""
    beside: Beside | None = None


class DecodeReplica:
    """Owner of one scheduler. `on_ended` is called with every job that has all its tokens."""

    def __init__(self, number: int, of: Setting, scheduler: DecodeScheduler[Job], pool: PagePool) -> None:
        self.number, self.of, self._world = number, of, of.world
        self.pool, self.scheduler = pool, scheduler
        self.on_ended: Callable[[Job], None] = lambda _: None
        self.tally = DecodeTally(pages=pool.num_pages)
        self._run: StepRun | None = None
        self._version = 0
        self._copies_until = 0.0
        self._dead = False

    # Calls from others -------------------------------------------------------------------------------------------

    def admit(self, job: Job) -> Seat[Job]:
        """Room for a job. Raises `RequestError` or `Overloaded`."""
        self._catch_up()
        seat = self.scheduler.admit(job, job.rows, job.rows + job.max_tokens - 1, job.names)
        self._note_pages()
        run = self._run
        if run is not None and run.steps - run.counted > 1 and not self.scheduler.is_roomy:
            steady = self._steady_steps(run.shares, run.counted)
            if run.counted + steady < run.steps:
                self._take(run, run.counted + steady)
        return seat

    def land(self, seat: Seat[Job]) -> None:
        """Decode a job from now on: its KV is complete."""
        job = seat.owner
        job.times.enter(Stage.DECODE_QUEUE, self._world.now)
        self._world.log.add(self._world.now, EventKind.LANDED, self.number, job.number)
        self._catch_up()
        if job.names:
            publish(self.pool, seat, job.names)
        self.scheduler.land(seat, max(1, job.emitted))
        self.wake()

    def leave(self, seat: Seat[Job]) -> None:
        """End a job. Its pages are free once no step uses them. Without effect if the job has all its tokens."""
        if seat.place is Place.GONE:
            return
        self._catch_up()
        self.scheduler.leave(seat)
        self.wake()

    def stop(self) -> list[Job]:
        """Let the node die: it does nothing any more. Returns the jobs that it had."""
        self._version += 1
        self._run, self._dead = None, True
        jobs = [seat.owner for seat in self.scheduler.seats]
        for seat in self.scheduler.seats:
            self.scheduler.leave(seat)
        return jobs

    def held_tokens(self, job: Job) -> int:
        """Tokens of the job's prompt whose pages this replica holds."""
        return len(self.pool.kept.match(job.names)) * self.scheduler.footprint.page_tokens

    # Steps -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Plan as soon as the step under way is over."""
        run = self._run
        if run is None:
            self._plan()
        elif run.steps > run.counted + 1:
            self._take(run, run.counted + 1)

    def _plan(self) -> None:
        plan = self.scheduler.schedule()
        shares, beside, now = plan.shares, self.of.beside, self._world.now
        if plan.leaving or plan.returning:
            self._start_copies(plan)
        beside_s = 0.0 if beside is None else beside.begin()
        if not shares and not beside_s:
            self._run = None
            return
        batch = context = 0
        decoding = Stage.DECODE  # a local name: looking up a member of an enumeration is slow
        replays: list[tuple[int, int]] = []
        for seat, rows, replay in shares:
            if replay:
                replays.append((seat.rows, rows))
            else:
                batch += 1
                context += seat.rows
            times = seat.owner.times
            if times.stage is not decoding:
                times.enter(decoding, now)
        cost = self.of.cost.decode(batch or 1)
        steps = 1 if replays or beside_s or not self._world.macro else self._steady_steps(shares)
        replay_s = beside_s + (self.of.cost.replay(replays) if replays else 0.0)
        run = self._run = StepRun(shares, now, context, cost, replay_s)
        self._note_pages()
        self._take(run, steps)

    def _take(self, run: StepRun, steps: int) -> None:
        """Let the run have `steps` steps, and plan its end."""
        run.steps = steps
        run.seconds = run.replay_s + (run.cost.seconds(run.context, steps) if run.shares else 0.0)
        self._version += 1
        world = self._world
        world.compute(run.began + run.seconds - world.now, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        run = self._run
        if version != self._version or run is None:
            return
        self._count(run, run.steps - 1)
        self._run = None
        self.scheduler.stepped(run.shares, advanced=True)
        now, log, tally = self._world.now, self._world.log, self.tally
        seconds = now - run.began
        log.add(now, EventKind.STEP, self.number, len(run.shares))
        if log.keep_spans:
            log.span(f"decode-{self.number}", "step", run.began, now, len(run.shares))
        stretched = seconds / run.seconds if run.seconds else 1.0
        attend_s, approximation_s = run.cost.attend_s(run.context, run.steps) if run.shares else (0.0, 0.0)
        attend_s, approximation_s = attend_s * stretched, approximation_s * stretched
        chosen, steps = 0, run.steps
        gone = Place.GONE
        over: list[Job] = []
        for seat, _, replay in run.shares:
            job = seat.owner
            account = job.account
            account.attend_s += attend_s
            account.approximation_s += approximation_s
            if replay or seat.place is gone:
                continue
            chosen += 1
            job.left -= steps
            if job.left <= 0:
                over.append(job)
                self.scheduler.leave(seat)
        tally.tokens += chosen * steps
        tally.steps += steps
        tally.busy_s += seconds
        tally.page_seconds += seconds * (self.pool.num_pages - self.pool.free_pages)
        if self._world.cores is not None:
            self._world.cores.deliver(chosen)
        if chosen:
            tally.gaps[_step_of(seconds / steps)] += chosen * steps
        if self.of.beside is not None:
            self.of.beside.end()
        # As in the live loop, the next step is planned before anyone is told which jobs ended.
        if self._run is None:
            self._plan()
        for job in over:
            self.on_ended(job)

    def _steady_steps(self, shares: list[StepShare[Job]], over: int = 0) -> int:
        """How many steps, the present one included, the scheduler would plan alike. The count ends when the first
        sequence ends, when a landed sequence waits for a place, or when the batch comes near the end of the pages. None
        of `shares` is a replay, and `over` of their steps are over."""
        scheduler = self.scheduler
        if scheduler.swapped:
            return 1
        most = max(1, min([share.seat.owner.left for share in shares]) - over)
        if scheduler.is_roomy:
            return most
        if len(shares) < self.of.max_batch and scheduler.waiting:
            return 1
        if self._has_pages(shares, most - 1):
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._has_pages(shares, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low

    def _has_pages(self, shares: list[StepShare[Job]], steps: int) -> bool:
        """Whether the scheduler swaps nobody out when it plans after `steps` more steps."""
        if not steps:
            return True
        footprint = self.scheduler.footprint
        sealed, ahead = footprint.sealed, steps + self.scheduler.lookahead.low
        if len(shares) * (1 + ahead // footprint.page_tokens) <= self.pool.free_pages:
            return True  # enough whatever each sequence has
        wanted = sum(
            max(0, sealed(min(seat.limit, seat.rows + ahead)) - seat.pages) for seat in (share.seat for share in shares)
        )
        return wanted <= self.pool.free_pages

    def _catch_up(self) -> None:
        """Bring rows and pages to the state that single steps would have reached by now."""
        run = self._run
        if run is not None and run.steps - run.counted > 1:  # several steps: no replay or prompt runs beside them
            elapsed = self._world.now - run.began
            self._count(run, whole_steps(run.cost, run.context, run.steps, run.seconds, elapsed) - 1)

    def _count(self, run: StepRun, steps: int) -> None:
        """Apply the first `steps` steps of a run to rows and pages. The next step has the pages that it seals."""
        more = steps - run.counted
        if more <= 0:
            return
        run.counted = steps
        sealed, gone = self.scheduler.footprint.sealed, Place.GONE
        for seat, _, _ in run.shares:
            seat.rows += more
            missing = sealed(seat.rows + 1) - seat.pages
            if missing > 0 and seat.place is not gone:
                assert seat.grant is not None
                grown = self.pool.extend(seat.grant, missing)
                assert grown is not None, "steady steps do not run out of pages"
                seat.grant = grown
                self._note_pages()

    def _note_pages(self) -> None:
        used = self.pool.num_pages - self.pool.free_pages
        if used > self.tally.peak_pages:
            self.tally.peak_pages = used

    # Copies ------------------------------------------------------------------------------------------------------

    def _start_copies(self, plan: Plan[Job]) -> None:
        for seat in plan.leaving:
            seat.owner.times.enter(Stage.SWAP_WAIT, self._world.now)
            seat.owner.account.swaps += 1
            self.tally.swaps += 1
            self._world.log.add(self._world.now, EventKind.SWAP_OUT, self.number, seat.owner.number)
            self._copy(seat)
        for seat in plan.returning:
            self._world.log.add(self._world.now, EventKind.SWAP_IN, self.number, seat.owner.number)
            self._copy(seat)

    def _copy(self, seat: Seat[Job]) -> None:
        """Copy a sequence. Copies run one after another, beside the steps, as on the live swapper's thread."""
        now = self._world.now
        seconds = self.of.cost.swap(self.scheduler.footprint.resting_bytes(seat.rows))
        self._copies_until = max(now, self._copies_until) + seconds

        def copied() -> None:
            if not self._dead:
                self._copied(seat)

        self._world.after(self._copies_until - now, copied)

    def _copied(self, seat: Seat[Job]) -> None:
        self._catch_up()
        back = seat.place is Place.RETURNING
        self.scheduler.copied(seat)
        if back:
            seat.owner.times.enter(Stage.DECODE, self._world.now)
        self.wake()
