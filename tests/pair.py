"""Real nodes on a tiny FP32 checkpoint, joined by a wire within one process. Fixtures for tests of both nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hack_kernels import load
from hack_kernels.base import Pool
from hack_kernels.block_weight import as_numbers
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.stopwatch import HostStopwatch
from torch import Tensor

from decode_node.config import DecodeSettings
from decode_node.service import DecodeService
from hackkv.batch import Batch
from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, make_evicting
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.llama import Llama, Weights
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.nodes import NodeIdentity
from hackkv.types import (
    Decoded,
    DecodeJob,
    HandedOff,
    Landed,
    Prefilled,
    PrefillJob,
    Request,
    Reserved,
    Sampling,
    Swapped,
    Token,
)
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from tests.polling import POLL_S
from transport.base import KvSender
from transport.closing import closing
from transport.wires import Loopback, Wire

PI = 32
TIMEOUT_S = 240.0
EVICTING = tuple(name for name, preset in CODECS.items() if preset.make is make_evicting)
"""Codecs that evict rows of prompts. Sequences cannot share their pages."""
SHARING = tuple(sorted(set(CODECS) - set(EVICTING)))
"""All other codecs."""
DECODING = DecodeSettings(max_sequences=8, max_batch=8, landing_s=TIMEOUT_S)


@cache
def tiny_worker(
    codec: str = "hack",
    page_tokens: int = PI,
    layers: int = 2,
    backend: str = "auto",
    **settings: int | float | str | bool,
) -> Worker:
    """An FP32 model of `layers` layers with 4 query and 2 KV heads of 64 channels. With the backend `triton` it is on
    the GPU, if there is one."""
    with TemporaryDirectory() as folder:
        path = write_tiny(Path(folder), Tiny(layers=layers, max_context=1024))
        return load_worker(
            ModelConfig(
                path=str(path), dtype="float32", backend=backend, device="auto" if backend == "triton" else "cpu"
            ),
            CodecConfig(name=codec, settings={"page_tokens": page_tokens, **settings}),
        )


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random token ids in 3..499: no special tokens. Ids from 500 on are for tokens that a test poisons."""
    return tuple(torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def greedy(name: str, prompt_ids: tuple[int, ...], max_tokens: int, **sampling: object) -> Request:
    """A request whose output is a function of the model alone."""
    return Request(name, prompt_ids, replace(Sampling(0, max_tokens, temperature=0.0), **sampling))  # type: ignore[arg-type]


def poisoned(worker: Worker, token_id: int) -> Worker:
    """The same model, but K and V of `token_id` are NaN from the first layer on."""
    weights = worker.model.weights
    embed = as_numbers(weights.embed).clone()
    embed[token_id] = torch.nan
    return _with_weights(worker, replace(weights, embed=embed))


def unspeakable(worker: Worker, token_id: int) -> Worker:
    """The same model, of one layer, but logits after `token_id` are not finite, although every K and V is. Only the
    last feed-forward overflows, in a channel that is 0 for all other tokens."""
    weights = worker.model.weights
    (layer,) = weights.layers
    embed, out, gate_up = (
        as_numbers(weights.embed).clone(),
        as_numbers(layer.out).clone(),
        as_numbers(layer.gate_up).clone(),
    )
    embed[:, 0], out[0], gate_up[:, 0] = 0, 0, 3e38
    embed[token_id, 0] = 1
    changed = replace(weights, embed=embed, layers=(replace(layer, out=out, gate_up=gate_up),))
    return _with_weights(worker, changed)


def _with_weights(worker: Worker, weights: Weights) -> Worker:
    model = Llama(worker.model.spec, weights, kernels=worker.model.kernels)
    return replace(worker, model=model)


class GatedCodec(PagedCodec):
    """Codec `fp16` whose engine thread waits for a permit before it attends. So a test can stop a pass at any layer."""

    def __init__(self, page_tokens: int = PI, layers: int = 2) -> None:
        fmt, backend = RowFormat(64, page_tokens), load("auto")
        kept = Kept(fmt, backend.kernels_for(fmt, RowReference))
        super().__init__("fp16", (kept,) * layers, backend, (("page_tokens", str(page_tokens)),))
        self.permits = threading.Semaphore(0)
        self._opened = threading.Event()
        self.arrived = threading.Semaphore(0)
        """Released each time that the engine comes to the gate."""

    def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.arrived.release()
        assert self._opened.is_set() or self.permits.acquire(timeout=TIMEOUT_S)
        return super().attend(layer, pool, batch, q, k, v)

    def open(self) -> None:
        """Let everything through from now on."""
        self._opened.set()
        self.permits.release(64)  # more than there are threads that wait

    def reached(self) -> None:
        """Return when the engine waits at the gate; for `asyncio.to_thread`."""
        assert self.arrived.acquire(timeout=TIMEOUT_S)


def twin(codec: KvCodec) -> KvCodec:
    """The same codec with timers of its own."""
    other = copy(codec)
    assert isinstance(other, PagedCodec)
    other.sealing, other.attending = HostStopwatch(), HostStopwatch()
    return other


@dataclass(frozen=True, slots=True)
class Pair:
    """One prefill and one decode node, the address of the latter, and the wire on which the former reaches it."""

    prefill: PrefillService
    decode: DecodeService
    address: str
    sender: KvSender

    async def assert_idle(self) -> None:
        """Assert that no page, prompt, sequence or frame is held. Waits for the pages that steps and copies still
        use."""
        async with asyncio.timeout(TIMEOUT_S):
            while (info := await self.decode.describe()).running or info.free_pages < info.total_pages:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # no event reports the end of a step or a copy
        for info in (await self.prefill.describe(), await self.decode.describe()):
            assert (info.free_pages, info.running, info.waiting, info.queued_tokens) == (info.total_pages, 0, 0, 0)
        assert self.prefill.outbox.held_bytes == 0

    async def serve(
        self,
        request: Request,
        transfer_id: str = "",
        epoch: int = 0,
        emitted: tuple[int, ...] = (),
        arrived: asyncio.Semaphore | None = None,
    ) -> Served:
        """Serve a request from begin to end, as a router would. If the tokens `emitted` are known, serve the rest.

        `arrived` is released once, when the decode node has the KV.
        """
        transfer_id = transfer_id or request.request_id
        async with closing(self.decode.decode(DecodeJob(request, transfer_id, epoch, emitted))) as decoding:
            reserved = await anext(decoding)
            assert isinstance(reserved, Reserved)
            job = PrefillJob(request, transfer_id, epoch, self.address, held=reserved.held)
            async with closing(self.prefill.prefill(job)) as prefilling:
                prefilled = await anext(prefilling)
                assert isinstance(prefilled, Prefilled)
                if prefilled.token.finish is not None:
                    return Served([prefilled.token], prefilled, None, None)
                handed_off = await anext(prefilling)
                assert isinstance(handed_off, HandedOff)
            if arrived is not None:
                arrived.release()
            assert await anext(decoding) == Landed(handed_off.receipt)
            tokens, decoded, swaps = [] if emitted else [prefilled.token], None, 0
            async for event in decoding:
                if isinstance(event, Token):
                    tokens.append(event)
                elif isinstance(event, Swapped):
                    swaps += 1
                else:
                    assert isinstance(event, Decoded)
                    decoded = event
            return Served(tokens, prefilled, handed_off, decoded, swaps)


@dataclass(frozen=True, slots=True)
class Served:
    """The events of one request that a router sees."""

    tokens: list[Token]
    prefilled: Prefilled
    handed_off: HandedOff | None
    decoded: Decoded | None
    swaps: int = 0


@asynccontextmanager
async def paired(
    prefill: Worker,
    decode: Worker | None = None,
    *,
    num_pages: int = 64,
    chunk_pages: int = 2,
    host_bytes: int = 1 << 30,
    queue_tokens: int = 1 << 20,
    frame_bytes: int = 512 << 10,
    decoding: DecodeSettings = DECODING,
    timeout_s: float = TIMEOUT_S,
    over: str | Wire = "inproc",
) -> AsyncIterator[Pair]:
    """Start both nodes; close them at the end. By default both have the same model and codec, with separate timers."""
    if decode is None:
        gated = isinstance(prefill.codec, GatedCodec)
        decode = prefill if gated else replace(prefill, codec=twin(prefill.codec))
    wire = Loopback(over, timeout_s)
    sender, listener = wire.sender(), wire.listener()
    prefill_service = PrefillService(
        NodeIdentity("p", "p", "1"),
        prefill,
        sender,
        num_pages,
        PrefillSettings(
            max_prompts=32,
            chunk_tokens=chunk_pages * prefill.layout.page_tokens,
            host_bytes=host_bytes,
            queue_tokens=queue_tokens,
            frame_bytes=frame_bytes,
        ),
    )
    decode_service = DecodeService(
        NodeIdentity("d", "d", "1"),
        decode,
        num_pages,
        decoding,
    )
    try:
        await decode_service.record()
        address = await listener.serve(decode_service.inbox.deliver, decode_service.inbox.lend)
        yield Pair(prefill_service, decode_service, address, sender)
    finally:
        await prefill_service.close()
        await decode_service.close()
        await sender.close()
        await listener.close()
        await wire.close()


@asynccontextmanager
async def exchanged(nodes: Pair, worker: Worker, *, num_pages: int = 64, **settings: Any) -> AsyncIterator[Pair]:
    """The same decode node beside a prefill node that has computed nothing yet."""
    shared = PrefillSettings.model_validate(
        {"max_prompts": 32, "chunk_tokens": 2 * worker.layout.page_tokens, **settings}
    )
    own = replace(worker, codec=twin(worker.codec))
    fresh = PrefillService(NodeIdentity("q", "q", "1"), own, nodes.sender, num_pages, shared)
    try:
        yield replace(nodes, prefill=fresh)
    finally:
        await fresh.close()
