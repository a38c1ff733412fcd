"""The journal behind the router's own page: the last requests, the last minutes, and nodes that are gone.

The journal is bounded, lives in memory and holds no text: prompts and outputs are counted, never kept. For more than
the last minutes there is `/metrics`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, Final

from hackkv.timing import Stage
from router.config import TRACE_ID
from router.fleet.fleet import Fleet
from router.fleet.membership import AnyMember
from router.life.flight import Flight
from router.watch.account import kv_account, time_account
from router.watch.metrics import Outcome

SAMPLE_S: Final = 1.0
SAMPLES: Final = 300
ENDED: Final = 200
GONE_S: Final = 600.0
"""Seconds that a node which is gone is remembered."""

FINISHED: Final = (Outcome.STOP, Outcome.LENGTH)

TOTALS: Final = (
    *("finished", "failed", "prompt_tokens", "output_tokens", "kv_bytes", "fp16_bytes"),
    *("cached_tokens", "fetched_tokens", "held_tokens"),
    *(f"{stage}_s" for stage in Stage),
)
"""Counted since the router started, so that the difference of two samples is what happened between them. Stages are
summed over finished sequences. A sequence that ended in any other way counts as failed."""
FIELDS: Final = ("seq", "at_s", "live", "waiting", *TOTALS)
"""Columns of a sample."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Sequences on their way."""

    sequences: int = 0
    tokens: int = 0
    """Output tokens of the sequences so far."""

    def __add__(self, other: UnderWay) -> UnderWay:
        return UnderWay(self.sequences + other.sequences, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node, and when it was last in the fleet."""

    member: AnyMember
    at_s: float


class Journal:
    """Notes sequences as they come and go, and once a second takes a sample of the totals."""

    def __init__(self, fleet: Fleet, now: Callable[[], float] = perf_counter, trace_link: str = "") -> None:
        """`trace_link` is the address at which a trace can be seen, with `{trace_id}` in it."""
        self._fleet, self._now, self._began, self._trace_link = fleet, now, now(), trace_link
        self.started = time()
        """Start in Unix time, which tells this process of the router from an earlier one."""
        self.elsewhere = UnderWay()
        """Sequences on their way in other processes of the router."""
        self._live: dict[int, Flight] = {}
        self._totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
        self._ended: deque[dict[str, Any]] = deque(maxlen=ENDED)
        self._samples: deque[list[float]] = deque(maxlen=SAMPLES)
        self._num_samples = 0
        self._seen: dict[str, _Seen] = {}

    @property
    def at_s(self) -> float:
        """Seconds since the router started."""
        return self._now() - self._began

    @property
    def under_way(self) -> UnderWay:
        """Sequences on their way in this process."""
        return UnderWay(len(self._live), sum(len(flight.output.token_ids) for flight in self._live.values()))

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def began(self, flight: Flight) -> None:
        """A sequence is on its way; `ended` follows."""
        self._live[id(flight)] = flight

    def ended(self, flight: Flight, outcome: Outcome) -> None:
        """A sequence is over."""
        self._live.pop(id(flight), None)
        account = _account(flight, self._fleet.nodes.codec) | {"outcome": outcome}
        if self._trace_link and account["trace_id"]:
            account["trace_link"] = self._trace_link.replace(TRACE_ID, account["trace_id"])
        self.take(account, prefilled=flight.route.prefilled is not None)

    def take(self, account: dict[str, Any], *, prefilled: bool) -> None:
        """Note the account of a sequence that is over; `prefilled` says whether its prompt was computed."""
        ended = int(self._totals["finished"] + self._totals["failed"])
        account |= {"seq": ended + 1, "arrived_s": self.at_s - account["total_s"]}
        self._ended.append(account)
        self._count(account, prefilled)

    def sample(self) -> None:
        """Take one sample, and note which nodes are in the fleet."""
        self.see_nodes()
        self._num_samples += 1
        live = self.under_way + self.elsewhere
        totals = {**self._totals, "output_tokens": self._totals["output_tokens"] + live.tokens}
        counts = (live.sequences, self._fleet.waiting, *(totals[name] for name in TOTALS))
        self._samples.append([self._num_samples, round(self.at_s, 3), *counts])

    def see_nodes(self) -> None:
        """Note which nodes are in the fleet."""
        now_s = self.at_s
        for member in self._fleet.nodes.members():
            self._seen[member.node_id] = _Seen(member, now_s)
        self._seen = {node_id: seen for node_id, seen in self._seen.items() if now_s - seen.at_s <= GONE_S}

    async def cluster(self, after: int) -> dict[str, Any]:
        """The last minutes: samples with a number above `after`, and nodes that are gone."""
        return {
            "started": self.started,
            "at_s": self.at_s,
            "live": (self.under_way + self.elsewhere).sequences,
            "waiting": self._fleet.waiting,
            "gone": self.gone(),
            "samples": {"fields": FIELDS, "rows": [row for row in self._samples if row[0] > after]},
        }

    def gone(self) -> list[dict[str, Any]]:
        """Nodes that were in the fleet and no longer are: lost, or stopped in good order."""
        alive = {member.node_id for member in self._fleet.nodes.members()}
        return [
            {
                "id": node_id,
                "role": seen.member.info.role,
                "drained": seen.member.draining,
                "gone_s": self.at_s - seen.at_s,
            }
            for node_id, seen in self._seen.items()
            if node_id not in alive
        ]

    def has_seen(self, node_id: str) -> bool:
        """Whether a node of that name is or was in the fleet, as far as that is remembered."""
        return node_id in self._seen

    def live(self) -> list[dict[str, Any]]:
        """Sequences on their way in this process, oldest first."""
        return [_progress(flight) for flight in self._live.values()]

    async def requests(self, after: int) -> dict[str, Any]:
        """Sequences on their way, and those that ended with a number above `after`; oldest first."""
        return {
            "at_s": self.at_s,
            "live": self.live(),
            "ended": [account for account in self._ended if account["seq"] > after],
        }

    def _count(self, account: dict[str, Any], prefilled: bool) -> None:
        totals, kv = self._totals, account["kv"]
        totals["prompt_tokens"] += account["prompt_tokens"] if prefilled else 0
        for name in ("output_tokens", "cached_tokens", "fetched_tokens", "held_tokens"):
            totals[name] += account[name]
        totals["kv_bytes"] += sum(kv["bytes_by_plane"].values()) + kv["header_bytes"]
        totals["fp16_bytes"] += kv["fp16_bytes"]
        if account["outcome"] in FINISHED:
            totals["finished"] += 1
            for stage, seconds in account["stages"].items():
                totals[f"{stage}_s"] += seconds
        else:
            totals["failed"] += 1


def _progress(flight: Flight) -> dict[str, Any]:
    """Facts of a sequence on its way. It has no stages yet: the stage of a wait is known only when the wait is over."""
    return {
        "id": flight.request.request_id,
        "trace_id": _trace_id(flight),
        "elapsed_s": flight.clock.total_s,
        "prompt_tokens": len(flight.request.prompt_ids),
        "output_tokens": len(flight.output.token_ids),
        "max_tokens": flight.request.sampling.max_tokens,
        "prefill_node": flight.route.prefill_node,
        "decode_node": flight.route.decode_node,
        "attempts": flight.route.attempts,
    }


def _trace_id(flight: Flight) -> str | None:
    """The trace in which the sequence can be found."""
    context = flight.span.context
    return context.trace_id if context is not None and context.sampled else None


def _account(flight: Flight, codec: str) -> dict[str, Any]:
    """Facts of a sequence that is over."""
    times = flight.output.at_s
    return {
        **_progress(flight),
        **time_account(flight.clock),
        "cached_tokens": flight.cached_tokens,
        "fetched_tokens": flight.fetched_tokens,
        "held_tokens": flight.held_tokens,
        "replayed_tokens": flight.route.replayed,
        "ttft_s": times[0] if times else None,
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        "kv": kv_account(codec, flight.route.receipts),
    }
