"""Decisions of live schedulers, recorded and made again: a proof that the simulator shares them.

A `Tape` keeps every call of a live scheduler with its answer: which sequences came, landed and left, which step was
planned, and when. `replay_decode` and `replay_prefill` make the same calls on a scheduler as the simulator builds it
(its page books count), and report the first answer that differs. The tape of a prefill node also keeps the answers
of host memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from decode_node.seats import Plan, Seat, StepShare
from hackkv.errors import ConfigError, HackkvError, Overloaded, RequestError
from hackkv.page_names import PageName
from prefill_node.host_pool import HostPool
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from sim.books import CountedPages, CountedPrefixes

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """One call of a scheduler. Sequences and prompts are numbered in the order in which they came."""

    name: str
    at_s: float
    arguments: list[Any]
    answer: Any = None


@dataclass(slots=True)
class Tape:
    """Calls in their order, from the moment at which recording began."""

    calls: list[SchedulerCall] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)

    def add(self, name: str, arguments: list[Any], answer: Any = None) -> None:
        """Append a call that has just been answered."""
        self.calls.append(SchedulerCall(name, perf_counter() - self.began, arguments, answer))

    def write(self, path: Path) -> None:
        """Write the tape as JSON lines."""
        path.write_text("".join(f"{json.dumps(asdict(call))}\n" for call in self.calls), encoding="utf-8")

    def step_seconds(self) -> list[float]:
        """Seconds of each step or pass, from its plan to its end, for `sim.costs.Recorded`."""
        seconds, planned = [], 0.0
        for call in self.calls:
            if call.name == "schedule":
                planned = call.at_s
            elif call.name in ("stepped", "commit"):
                seconds.append(call.at_s - planned)
        return seconds


def read_tape(path: Path) -> Tape:
    """Read a tape. Raises `ConfigError` naming file and line."""
    calls = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            calls.append(SchedulerCall(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: no call of a tape: {error}") from error
    return Tape(calls)


# Decode --------------------------------------------------------------------------------------------------------------


def record_decode(scheduler: DecodeScheduler[Owner], tape: Tape) -> None:
    """Record every call of a live scheduler from now on. It has no sequences yet, and sequences share no pages."""
    numbers: dict[Seat[Owner], int] = {}
    admit, land, leave = scheduler.admit, scheduler.land, scheduler.leave
    schedule, stepped, copied = scheduler.schedule, scheduler.stepped, scheduler.copied
    count = iter(range(1 << 62))

    def admitted(owner: Owner, rows: int, limit: int, names: Sequence[PageName] = ()) -> Seat[Owner]:
        number = next(count)
        try:
            seat = admit(owner, rows, limit, names)
        except HackkvError as error:
            tape.add("admit", [number, rows, limit], error.code)
            raise
        numbers[seat] = number
        tape.add("admit", [number, rows, limit])
        return seat

    def landed(seat: Seat[Owner], pending: int = 1) -> None:
        land(seat, pending)
        tape.add("land", [numbers[seat], pending])

    def left(seat: Seat[Owner]) -> None:
        leave(seat)
        tape.add("leave", [numbers[seat]])

    def scheduled() -> Plan[Owner]:
        plan = schedule()
        tape.add("schedule", [], _plan(plan, numbers.__getitem__))
        return plan

    def step_over(shares: list[StepShare[Owner]], *, advanced: bool) -> None:
        stepped(shares, advanced=advanced)
        tape.add("stepped", [[numbers[share.seat] for share in shares], advanced])

    def copy_over(seat: Seat[Owner]) -> None:
        copied(seat)
        tape.add("copied", [numbers[seat]])

    for name, wrapped in (
        ("admit", admitted),
        ("land", landed),
        ("leave", left),
        ("schedule", scheduled),
        ("stepped", step_over),
        ("copied", copy_over),
    ):
        setattr(scheduler, name, wrapped)


def _plan(plan: Plan[Owner], number: Callable[[Seat[Owner]], int]) -> list[Any]:
    shares = [[number(share.seat), share.rows, share.replay] for share in plan.shares]
    return [shares, [number(seat) for seat in plan.leaving], [number(seat) for seat in plan.returning]]


def replay_decode(tape: Tape, live: DecodeScheduler[Any], pages: int, slots: int, limits: SchedulerLimits) -> list[str]:
    """Make a tape's calls on a scheduler over a book that counts. Returns the first decision that differs, in words.

    Only the sizes of `live` are used.
    """
    scheduler: DecodeScheduler[int] = DecodeScheduler(CountedPages(pages, slots), live.footprint, limits)
    seats: dict[int, Seat[int]] = {}
    shares: list[StepShare[int]] = []
    wrong: list[str] = []
    for place, call in enumerate(tape.calls):
        answer: Any = None
        match call.name:
            case "admit":
                number, rows, limit = call.arguments
                try:
                    seats[number] = scheduler.admit(number, rows, limit)
                except (Overloaded, RequestError) as error:
                    answer = error.code
            case "land":
                scheduler.land(seats[call.arguments[0]], call.arguments[1])
            case "leave":
                scheduler.leave(seats[call.arguments[0]])
            case "schedule":
                plan = scheduler.schedule()
                shares, answer = plan.shares, _plan(plan, lambda seat: seat.owner)
            case "stepped":
                scheduler.stepped(shares, advanced=call.arguments[1])
            case "copied":
                scheduler.copied(seats[call.arguments[0]])
        if answer != call.answer:
            wrong.append(f"call {place}, {call.name}{call.arguments}: {answer} and not {call.answer}")
            break
    return wrong


# Prefill -------------------------------------------------------------------------------------------------------------


def record_prefill(scheduler: PrefillScheduler[Owner], tape: Tape) -> None:
    """Record every call of a live scheduler from now on. It has no prompts yet, and prompts share no prefixes."""
    numbers: dict[Prompt[Owner], int] = {}
    add, leave, schedule = scheduler.add, scheduler.leave, scheduler.schedule
    commit, abandon = scheduler.commit, scheduler.abandon

    def added(prompt: Prompt[Owner]) -> None:
        add(prompt)
        numbers[prompt] = len(numbers)
        tape.add("add", [numbers[prompt], prompt.num_tokens])

    def left(prompt: Prompt[Owner]) -> None:
        leave(prompt)
        tape.add("leave", [numbers[prompt]])

    def scheduled(admit: Callable[[Owner], bool] = lambda _: True) -> list[Chunk[Owner]]:
        answers: list[bool] = []

        def asked(owner: Owner) -> bool:
            answers.append(admit(owner))
            return answers[-1]

        chunks = schedule(asked)
        tape.add("schedule", answers, [[numbers[c.prompt], c.start, c.count] for c in chunks])
        return chunks

    def committed() -> None:
        commit()
        tape.add("commit", [])

    def abandoned() -> None:
        abandon()
        tape.add("abandon", [])

    for name, wrapped in (
        ("add", added),
        ("leave", left),
        ("schedule", scheduled),
        ("commit", committed),
        ("abandon", abandoned),
    ):
        setattr(scheduler, name, wrapped)


def replay_prefill(tape: Tape, pages: int, slots: int, page_tokens: int, chunk_tokens: int) -> list[str]:
    """Make a tape's calls on a scheduler over a book that counts. Returns the first decision that differs, in words."""
    book = CountedPrefixes(pages, slots, page_tokens, HostPool(0, lambda _: None), 1)
    scheduler: PrefillScheduler[int] = PrefillScheduler(book, chunk_tokens)
    prompts: dict[int, Prompt[int]] = {}
    for place, call in enumerate(tape.calls):
        answer: Any = None
        match call.name:
            case "add":
                number, tokens = call.arguments
                prompts[number] = Prompt(number, tokens)
                scheduler.add(prompts[number])
            case "leave":
                scheduler.leave(prompts[call.arguments[0]])
            case "schedule":
                answers: Iterator[bool] = iter(call.arguments)
                chunks = scheduler.schedule(lambda _, answers=answers: next(answers, False))  # type: ignore[misc]
                answer = [[chunk.prompt.owner, chunk.start, chunk.count] for chunk in chunks]
                if next(answers, None) is not None:
                    answer = "asked host memory less often"
            case "commit":
                scheduler.commit()
            case "abandon":
                scheduler.abandon()
        if answer != call.answer:
            return [f"call {place}, {call.name}{call.arguments}: {answer} and not {call.answer}"]
    return []
