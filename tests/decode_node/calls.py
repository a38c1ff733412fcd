"""Calls of a decode node, as its router makes them. Fixtures for tests of the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from collections.abc import Sequence as Series
from dataclasses import replace

from hack_kernels.base import Pool
from torch import Tensor

from decode_node.config import DecodeSettings
from hackkv.batch import Batch
from hackkv.errors import (
    by_code,
)
from hackkv.model.generate import generate
from hackkv.model.worker import Worker
from hackkv.types import (
    DecodeEvent,
    DecodeJob,
    HandedOff,
    HandoffFailed,
    Landed,
    Prefilled,
    PrefillJob,
    Request,
    Reserved,
)
from tests.pair import PI, TIMEOUT_S, Pair, Served, greedy, paired, twin
from transport.closing import closing


async def landed(nodes: Pair, request: Request) -> AsyncIterator[DecodeEvent]:
    """A decode call whose KV has landed. Its next event is a token."""
    events = nodes.decode.decode(DecodeJob(request, request.request_id, 0))
    reserved = await anext(events)
    assert isinstance(reserved, Reserved)
    job = PrefillJob(request, request.request_id, 0, nodes.address, held=reserved.held)
    async with closing(nodes.prefill.prefill(job)) as prefilling:
        assert isinstance(await anext(prefilling), Prefilled)
        assert isinstance(await anext(prefilling), HandedOff)
    assert isinstance(await anext(events), Landed)
    return events


async def close(events: AsyncIterator[DecodeEvent]) -> None:
    async with closing(events):
        pass


async def reserved(nodes: Pair, name: str, prompt_tokens: int, max_tokens: int) -> AsyncIterator[DecodeEvent]:
    """A decode call with a reservation."""
    events = nodes.decode.decode(DecodeJob(greedy(name, (5,) * prompt_tokens, max_tokens), name, 0))
    assert await anext(events) == Reserved()
    return events


async def drain(nodes: Pair, job: PrefillJob) -> None:
    """Prefill up to the outcome of the first push. Raises its failure."""
    async with closing(nodes.prefill.prefill(job)) as events:
        async for event in events:
            if isinstance(event, HandoffFailed):
                raise by_code(event.code, event.message)
            if isinstance(event, HandedOff):
                return


def held_up(worker: Worker, timeout_s: float = TIMEOUT_S) -> tuple[Worker, threading.Event]:
    """The worker with a codec of its own whose passes wait for an event, and the event."""
    codec, begin = twin(worker.codec), threading.Event()
    attend = codec.attend

    def wait_and_attend(layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert begin.wait(timeout_s)
        return attend(layer, pool, batch, q, k, v)

    codec.attend = wait_and_attend  # type: ignore[method-assign]
    return replace(worker, codec=codec), begin


async def begun_together(
    nodes: Pair,
    begin: threading.Event,
    requests: Series[Request],
    emitted: Series[tuple[int, ...]] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[Served]:
    """Run `ends_together`. Raises the first failure."""
    ends = await ends_together(nodes, begin, requests, emitted, timeout_s)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if isinstance(end, Served)]


async def ends_together(
    nodes: Pair,
    begin: threading.Event,
    requests: Series[Request],
    emitted: Series[tuple[int, ...]] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[Served | BaseException]:
    """Let the decode node of `held_up` begin when the KV of all requests has arrived; return the outcome of each.

    So all sequences need pages at the same time, however slow the machine is. If the tokens `emitted` of a request are
    known, only the rest is served."""
    arrived = asyncio.Semaphore(0)
    served = asyncio.gather(
        *(
            nodes.serve(request, emitted=known, arrived=arrived)
            for request, known in zip(requests, emitted or [()] * len(requests), strict=True)
        ),
        return_exceptions=True,
    )
    async with asyncio.timeout(timeout_s):
        for _ in requests:
            await arrived.acquire()
    begin.set()
    return await served


async def go_on_in_few_pages(worker: Worker, requests: Series[Request], cut: int, num_pages: int) -> list[Served]:
    """Continue requests whose first `cut` tokens another node chose, all at once and in fewer pages than they need
    together. Asserts that some are swapped, and that all tokens are those of undisturbed runs."""
    whole = [generate(worker, request) for request in requests]
    decode, begin = held_up(worker)
    async with paired(worker, decode, num_pages=num_pages, decoding=DecodeSettings(replay_tokens=PI)) as nodes:
        emitted = [tuple(token.token_id for token in tokens[:cut]) for tokens in whole]
        served = await begun_together(nodes, begin, requests, emitted)
        await nodes.assert_idle()
    assert sum(result.swaps for result in served) > 0
    assert [result.tokens for result in served] == [tokens[cut:] for tokens in whole]
    return served
