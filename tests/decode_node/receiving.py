"""A decode node's inbox behind a wire, and handoffs for it. Fixtures for tests of receiving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import torch
from torch import Tensor

from decode_node.inbox import Inbox, Reservation
from decode_node.pages import Grant
from hackkv.codec import rows_held
from hackkv.codecs.paged import PagedCodec
from hackkv.framing import FrameWriter, handoff_end
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker
from hackkv.types import DecodeJob, Handoff, HandoffEnd, KvFrame
from hackkv.wire_form import WireForm
from tests.pair import PI, greedy, prompt, tiny_worker
from transport.base import KvSender
from transport.wires import Loopback

Frames = AsyncIterator[KvFrame | HandoffEnd]
TOKENS = 2 * PI + 5
"""Rows that arrive."""
GRANT = Grant((5, 2, 7), 1)
REQUEST = greedy("r", prompt(1, TOKENS), 4)


class Decode:
    """A decode node's inbox behind a wire, and a sender that reaches it."""

    def __init__(self, wire: Loopback, codec: str = "hack") -> None:
        self.worker: Worker = tiny_worker(codec)
        self.runner = ModelRunner(self.worker.model, self.worker.codec, 9, 3)
        self.inbox = Inbox(self.runner, self.worker.fingerprint)
        self.listener = wire.listener()
        self.sender: KvSender = wire.sender()
        self.address = ""
        self.tokens = next(n for n in count(TOKENS) if rows_held(self.worker.codec, n) == TOKENS)
        """The number of tokens of the prompt."""
        self.request = greedy("r", prompt(1, self.tokens), 4)

    async def __aenter__(self) -> Decode:
        self.address = await self.listener.serve(self.inbox.deliver)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sender.close()
        await self.listener.close()

    @property
    def handoff(self) -> Handoff:
        return Handoff("t", 2, self.worker.fingerprint, self.tokens)

    def reserve(self) -> Reservation:
        return self.inbox.reserve(DecodeJob(self.request, "t", 2), GRANT)

    def bytes(self) -> list[Tensor]:
        """A copy of everything that the pools hold."""
        pools = [(*pool.planes.values(), pool.open_k, pool.open_v) for pool in self.runner.memory.pools]
        return [plane.clone().view(torch.uint8) for pool in pools for plane in pool]


def planned(
    worker: Worker, transfer_id: str = "t", epoch: int = 2, seed: int = 3, form: WireForm | None = None
) -> list[KvFrame | HandoffEnd]:
    """A correct handoff of random rows: for each layer the sealed pages that travel and the exact rows; then token 9.

    The wire form is `form`; by default the codec's.
    """
    generator = torch.Generator().manual_seed(seed)
    writer = FrameWriter(transfer_id, epoch, form or worker.codec.wire_form)
    items: list[KvFrame | HandoffEnd] = []
    codec, ids = worker.codec, torch.arange(2)
    assert isinstance(codec, PagedCodec)
    for layer, pool in enumerate(codec.new_pools(2, 1, range(2))):
        shape = (2, 2, codec.page_tokens, codec.formats[layer].head_dim)
        k, v = (torch.randn(shape, generator=generator).half() for _ in range(2))
        codec.layers[layer].kernels.seal(layer, pool, ids, ids * codec.page_tokens, k, v)
        planes = codec.to_wire(layer, pool, ids)
        for page in worker.footprint.sent_pages(TOKENS):
            items += writer.frames(layer, page, [{name: plane[:, page : page + 1] for name, plane in planes.items()}])
        exact = worker.footprint.exact_rows(TOKENS)
        held = (2, 1, exact, codec.formats[layer].head_dim)
        rows = {name: torch.full(held, layer + 0.5, dtype=torch.float16) for name in ("open_k", "open_v")}
        items += writer.frames(layer, 2, [rows], exact)
    return [*items, writer.end(9)]


async def send(items: list[KvFrame | HandoffEnd]) -> Frames:
    for item in items:
        yield item


class Untouched:
    """Frames of a sender that no receiver should ask for."""

    def __init__(self) -> None:
        self.touched = False

    async def frames(self) -> Frames:
        self.touched = True
        yield handoff_end("t", 2, 0, 9)
