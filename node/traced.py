"""Wrappers of both kinds of nodes that make a span for each call and for each stage within it.

A node reports the duration of a stage (`hackkv.timing`) when the stage is over. So a stage's span has the duration that
the node measured, and its place follows from the event that reports it. A prompt waits from the call on and is then
computed. A push ends with its report. A sequence queues after its KV has landed, and then runs until `Decoded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.nodes import NodeInfo
from hackkv.timing import Stage, SubStage
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    HandedOff,
    HandoffFailed,
    Landed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Reserved,
    Swapped,
)
from node.spans import NoSpans, ProcessTracer
from transport.base import DecodeNode, PrefillNode
from transport.closing import closing
from transport.trail import TRAIL, TraceSpan, Value

RESERVE, RECEIVE, SWAPPED = "reserve", "receive", "swapped"
"""Spans of a decode node that are not stages: the wait for pages, for the KV, and in host memory."""


class TracedPrefill:
    """A `PrefillNode` that is traced."""

    def __init__(self, node: PrefillNode, spans: ProcessTracer) -> None:
        self._node, self._spans = node, spans

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt."""
        with _called(self._spans, "Prefill", job.request.request_id, len(job.request.prompt_ids)) as (span, began):
            async with closing(self._node.prefill(job)) as events:
                async for event in events:
                    _tell_prefill(span, event, began)
                    yield event

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a job, and the pages that it holds."""
        await self._node.assign(transfer_id, epoch, decode_address, held)

    async def describe(self) -> NodeInfo:
        """Report the node's state."""
        return await self._node.describe()


class TracedDecode:
    """A `DecodeNode` that is traced."""

    def __init__(self, node: DecodeNode, spans: ProcessTracer) -> None:
        self._node, self._spans = node, spans

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request."""
        with _called(self._spans, "Decode", job.request.request_id, len(job.request.prompt_ids)) as (span, began):
            told = _DecodeTold(span, began)
            async with closing(self._node.decode(job)) as events:
                async for event in events:
                    told.tell(event)
                    yield event

    async def describe(self) -> NodeInfo:
        """Report the node's state."""
        return await self._node.describe()


def traced_prefill(node: PrefillNode, spans: ProcessTracer) -> PrefillNode:
    """`node`, traced if `spans` records anything."""
    return node if isinstance(spans, NoSpans) else TracedPrefill(node, spans)


def traced_decode(node: DecodeNode, spans: ProcessTracer) -> DecodeNode:
    """`node`, traced if `spans` records anything."""
    return node if isinstance(spans, NoSpans) else TracedDecode(node, spans)


@contextmanager
def _called(spans: ProcessTracer, name: str, request_id: str, tokens: int) -> Iterator[tuple[TraceSpan, float]]:
    """The span of a call, and its start. A call that its caller closes is no failure: callers close finished calls."""
    began = perf_counter()
    attributes: dict[str, Value] = {"hackkv.request_id": request_id, "hackkv.prompt_tokens": tokens}
    span = spans.begin(name, began, TRAIL.get().span.context, attributes)
    failure, closed = "", False
    try:
        yield span, began
    except (GeneratorExit, asyncio.CancelledError):
        closed = True
        raise
    except BaseException as error:
        failure = type(error).__name__
        raise
    finally:
        span.end(perf_counter(), {"hackkv.closed_by_caller": closed}, failure)


def _tell_prefill(span: TraceSpan, event: PrefillEvent, began: float) -> None:
    now = perf_counter()
    if isinstance(event, Prefilled):
        computing = min(now, began + event.queue_s)
        waiting = span.child(Stage.PREFILL_QUEUE, began)
        if event.fetch_s:
            fetched = {"hackkv.fetched_tokens": event.fetched_tokens, "hackkv.kv_bytes": event.fetched_bytes}
            waiting.child(SubStage.FETCH, began, fetched).end(min(computing, began + event.fetch_s))
        waiting.end(computing)
        done = min(now, computing + event.prefill_s)
        parts = {
            "hackkv.quantize_s": event.quantize_s, "hackkv.wire_encode_s": event.wire_encode_s,
            "hackkv.computed_tokens": event.computed_tokens,
        }  # fmt: skip
        span.child(Stage.PREFILL, computing, parts).end(done)
    elif isinstance(event, HandedOff):
        sending = max(began, now - event.transfer_s)
        if event.swap_wait_s:
            span.child(Stage.SWAP_WAIT, max(began, sending - event.swap_wait_s)).end(sending)
        size = sum(count for _, count in event.receipt.bytes_by_plane)
        span.child(Stage.TRANSFER, sending, {"hackkv.kv_bytes": size, "hackkv.epoch": event.epoch}).end(now)
    elif isinstance(event, HandoffFailed):
        span.child(Stage.TRANSFER, now, {"hackkv.epoch": event.epoch}).end(now, failure=event.code)


class _DecodeTold:
    """Turns the events of one call into spans."""

    def __init__(self, span: TraceSpan, began: float) -> None:
        self._span, self._mark = span, began
        self._swapped: TraceSpan | None = None

    def tell(self, event: DecodeEvent) -> None:
        """Take the next event."""
        now = perf_counter()
        if self._swapped is not None and not isinstance(event, Swapped):
            self._swapped.end(now)
            self._swapped = None
        if isinstance(event, Reserved):
            self._until(RESERVE, now)
        elif isinstance(event, Landed):
            self._until(RECEIVE, now, {"hackkv.receive_s": event.receipt.receive_s})
        elif isinstance(event, Swapped):
            self._swapped = self._swapped or self._span.child(SWAPPED, now)
        elif isinstance(event, Decoded):
            self._until(Stage.DECODE_QUEUE, min(now, self._mark + event.queue_s))
            parts = {"decode_s": event.decode_s, "attend_s": event.attend_s, "swapped_s": event.swapped_s}
            self._until(Stage.DECODE, now, {f"hackkv.{name}": seconds for name, seconds in parts.items()})

    def _until(self, name: str, now: float, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.child(name, self._mark, attributes).end(now)
        self._mark = now
