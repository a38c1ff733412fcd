"""The metrics of `/metrics`. Names follow vLLM's where the meaning is equal; ours begin with `hackkv_`.

Stage histograms and vLLM's latencies are per sequence (a request with n=3 counts three times) and are observed when
the last byte has been handed to the socket. Every HELP line names its unit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache, partial
from operator import sub
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from hackkv.timing import Stage, SubStage
from hackkv.types import Role
from router.fleet.fleet import Fleet
from router.life.failover import Cause, Remedy
from router.life.flight import Flight
from router.watch.histogram import BulkHistogram
from router.watch.node_metrics import FleetGauges

SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that prometheus_client reads when it is imported."""
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SERIES = 64
"""Series of one family that are cached."""
_REFUSALS = (400, 401, 404, 408, 413, 415, 429, 503)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Outcome(StrEnum):
    """The end of a sequence. The first two are OpenAI's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """A node found the request wrong (4xx). A request that the router itself refuses never becomes a sequence."""
    OVERLOADED = "overloaded"
    """429 or 503."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """A node, a transfer or this program failed (500, 502)."""


class Metrics:
    """All series of one router, in a registry of its own.

    If the environment names a folder `SHARED`, several processes of one router keep their values there, and each shows
    the sums (prometheus_client's multiprocess mode).
    """

    def __init__(self, model_name: str, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self._model, self._fleet = model_name, fleet
        self._sequence_series()
        self._transfer_series()
        self._dispatch_series()
        self._vllm_series()
        ours = frozenset(family.name for family in self.registry.collect())
        self._gauges = CollectorRegistry()
        self._gauges.register(FleetGauges(fleet, model_name, ours))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hackkv_{name}", text, labels, registry=self.registry)

    def _sequence_series(self) -> None:
        counter, histogram = self._counter, partial(Histogram, buckets=SECONDS, registry=self.registry)
        self._inflight = Gauge(
            "hackkv_router_inflight",
            "Sequences inside the router (count).",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        stage = histogram(
            "hackkv_request_stage_seconds",
            "Time of one sequence in each stage of its life, in seconds; the stages sum to its total.",
            ["codec", "stage"],
        )
        sub_stage = histogram(
            "hackkv_request_substage_seconds", "Parts of stages, in seconds; never added to the total.", ["stage"]
        )
        # `labels` takes longer than `observe`.
        self._stage, self._sub_stage = lru_cache(_SERIES)(stage.labels), lru_cache(_SERIES)(sub_stage.labels)
        self._requests = counter("requests", "Sequences that ended, by outcome (count).", "outcome")
        for outcome in Outcome:
            self._requests.labels(outcome)  # begin at 0: rate() misses the event that creates a series
        self._refused = counter(
            "http_refused", "HTTP requests that were refused before they had a sequence, by status (count).", "status"
        )
        for status in _REFUSALS:
            self._refused.labels(status)
        self._failovers = counter(
            "failovers",
            "Times that a sequence went on with other nodes: how (redispatched before its first token, reassigned with "
            "its KV, prefilled again), and why (count).",
            "kind",
            "cause",
        )
        for remedy in Remedy:
            for cause in Cause:
                self._failovers.labels(remedy, cause)
        self._replayed = counter(
            "replayed_tokens", "Tokens computed again after a failover because the client had them already (count)."
        )
        self._strays = counter(
            "stray_events", "Events of nodes that came twice, too late or out of order, and changed nothing (count).",
            "event",
        )  # fmt: skip
        self._diverged = counter("replayed_tokens_diverged", "Replayed tokens that differ from those sent (count).")

    def _transfer_series(self) -> None:
        counter = self._counter
        self._bytes = counter(
            "kv_transfer_bytes", "KV bytes on the wire, by codec and plane; plane 'header' is framing (bytes).",
            "codec", "plane",
        )  # fmt: skip
        self._fp16_bytes = counter(
            "kv_transfer_fp16_bytes", "What the transferred KV would weigh as FP16 (bytes).", "codec"
        )
        self._tokens = counter("kv_transfer_tokens", "Prompt tokens whose KV was verified and committed (count).")
        self._held = counter(
            "kv_held_tokens", "Prompt tokens whose KV did not travel because the decode node held it (count)."
        )
        self._fetched = counter(
            "kv_fetched_tokens",
            "Prompt tokens that were not computed because their KV came from a decode node (count).",
        )
        self._fetched_bytes = counter("kv_fetched_bytes", "KV that came from decode nodes, coded (bytes).")
        self._recomputed = counter(
            "prompt_tokens_recomputed",
            "Prompt tokens that a decode node served without receiving their KV (count); must stay 0.",
        )

    def _dispatch_series(self) -> None:
        tokens = self._counter(
            "dispatched_tokens", "Tokens of prompts that were given to nodes, by role (count).", "role"
        )
        held = self._counter(
            "dispatched_held_tokens",
            "Those of them that the router expected the chosen node to hold, by role (count).",
            "role",
        )
        for role, desk in ((Role.PREFILL, self._fleet.prefill), (Role.DECODE, self._fleet.decode)):
            desk.account.told = _counting(tokens.labels(role), held.labels(role))

    def _vllm_series(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> BulkHistogram:
            family = BulkHistogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(self._model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry).labels(self._model)

        self._prompt_total = counter("prompt_tokens", "Prompt tokens prefilled (count).")
        self._generation_total = counter("generation_tokens", "Tokens generated (count).")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that finished, by reason (count).",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token, in seconds.")
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens, in seconds.")
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean per token after the first, in seconds.")
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last byte, in seconds.")
        self._queue = histogram("request_queue_time_seconds", "In the router's and the workers' queues, in seconds.")
        self._prefill = histogram("request_prefill_time_seconds", "Computing the prompt, in seconds.")
        self._decode = histogram("request_decode_time_seconds", "Computing tokens on the decode node, in seconds.")
        self._prompt_size = histogram("request_prompt_tokens", "Tokens of one prompt (count).", TOKENS)
        self._output_size = histogram("request_generation_tokens", "Tokens of one output (count).", TOKENS)

    def entered(self) -> None:
        """A sequence was taken in; `left` follows."""
        self._inflight.inc()

    def left(self) -> None:
        """A sequence has left the router."""
        self._inflight.dec()

    def refused(self, status: int) -> None:
        """An HTTP request was answered with an error before it had a sequence."""
        self._refused.labels(status).inc()

    def failed_over(self, remedy: Remedy, cause: Cause) -> None:
        """A sequence goes on with other nodes."""
        self._failovers.labels(remedy, cause).inc()

    def ended(self, flight: Flight, outcome: Outcome) -> None:
        """A sequence is over and its last byte is out."""
        self._requests.labels(outcome).inc()
        stages = flight.clock.stages()
        for stage in Stage:
            self._stage(self._fleet.nodes.codec, stage).observe(stages[stage])
        for sub_stage in SubStage:
            self._sub_stage(sub_stage).observe(flight.clock.sub_stages[sub_stage])
        self._count_transfers(flight)
        self._diverged.inc(flight.output.diverged)
        self._replayed.inc(flight.route.replayed)
        for event, times in flight.route.strays.items():
            self._strays.labels(event).inc(times)
        self._generation_total.inc(len(flight.output.token_ids))
        if flight.route.prefilled is not None:
            self._prompt_total.inc(len(flight.request.prompt_ids))
            self._fetched.inc(flight.route.prefilled.fetched_tokens)
            self._fetched_bytes.inc(flight.route.prefilled.fetched_bytes)
            self._ttft.observe(flight.output.at_s[0] if flight.output.at_s else flight.clock.total_s)
        self._itl.observe_all(list(map(sub, flight.output.at_s[1:], flight.output.at_s)))
        if outcome in (Outcome.STOP, Outcome.LENGTH):
            self._count_success(flight, outcome, stages)

    def _count_transfers(self, flight: Flight) -> None:
        codec = self._fleet.nodes.codec
        for receipt in flight.route.receipts:
            for plane, size in receipt.bytes_by_plane:
                self._bytes.labels(codec, plane).inc(size)
            self._bytes.labels(codec, "header").inc(receipt.header_bytes)
            self._fp16_bytes.labels(codec).inc(receipt.fp16_bytes)
            self._tokens.inc(receipt.tokens)
            self._held.inc(receipt.held_tokens)
            self._recomputed.inc(max(0, len(flight.request.prompt_ids) - receipt.tokens))

    def _count_success(self, flight: Flight, outcome: Outcome, stages: dict[Stage, float]) -> None:
        self._success.labels(self._model, outcome).inc()
        self._e2e.observe(flight.clock.total_s)
        self._queue.observe(stages[Stage.ROUTER_QUEUE] + stages[Stage.PREFILL_QUEUE] + stages[Stage.DECODE_QUEUE])
        self._prefill.observe(stages[Stage.PREFILL])
        self._decode.observe(stages[Stage.DECODE])
        self._prompt_size.observe(len(flight.request.prompt_ids))
        self._output_size.observe(len(flight.output.token_ids))
        if len(flight.output.at_s) > 1:
            self._tpot.observe((flight.output.at_s[-1] - flight.output.at_s[0]) / (len(flight.output.at_s) - 1))

    def render(self) -> bytes:
        """The metrics of this process, in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self._gauges)

    async def page(self) -> bytes:
        """The metrics of all processes of the router, in Prometheus' text format."""
        folder = os.environ.get(SHARED)
        if not folder:
            return self.render()
        shared = CollectorRegistry()
        MultiProcessCollector(shared, folder)  # type: ignore[no-untyped-call]
        # In a thread: there may be many files. The fleet belongs to this loop.
        return await asyncio.to_thread(generate_latest, shared) + generate_latest(self._gauges)


def _counting(tokens: Counter, held: Counter) -> Callable[[int, int], None]:
    def count(of_prompt: int, expected: int) -> None:
        tokens.inc(of_prompt)
        held.inc(expected)

    return count
