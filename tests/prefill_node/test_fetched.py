"""Fetched pages on their way to the pages of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hackkv.expected import Expected
from hackkv.framing import FrameWriter
from hackkv.kv_memory import OPEN_PLANES, KvMemory
from hackkv.ledger import FrameLedger
from hackkv.types import KvFrame
from prefill_node.fetched import Fetched, Part
from tests.handoffs import random_plane
from tests.pair import PI, tiny_worker
from tests.prefill_node.fetching import FEW

PAGES = (5, 2, 7, 4)


def bytes_of(memory: KvMemory, page: int) -> list[torch.Tensor]:
    """The planes of a page in all layers."""
    layers = range(len(memory.pools))
    exported = (leaving.own() for layer in layers for leaving in memory.export(layer, [page]))
    return [plane.view(torch.uint8) for planes in exported for plane in planes.values()]


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("codec", FEW)
def test_pages_that_are_here_by_then_are_not_written(codec: str, first: int) -> None:
    """The prompt shares its first pages with others, which may read them. The pages that it lacks come bit-exactly."""
    worker, generator = tiny_worker(codec), torch.Generator().manual_seed(1)
    rows = len(PAGES) * PI
    expected = Expected(worker.layout, worker.codec.wire_planes, rows, worker.footprint)
    ledger, writer = FrameLedger("t", 0, expected), FrameWriter("t", 0)
    parts: list[Part] = []
    for layer in range(2):
        sent = worker.footprint.sent_pages(rows)
        sealed = {plane.name: random_plane(plane, 2, len(sent), generator) for plane in worker.codec.wire_planes[layer]}
        exact = {name: torch.full((2, 1, worker.footprint.exact_rows(rows), 64), layer + 0.5) for name in OPEN_PLANES}
        frames: list[KvFrame] = [*writer.frames(layer, sent.start, [sealed])]
        if worker.footprint.exact_rows(rows):
            frames += writer.frames(
                layer, 4, [{n: p.half() for n, p in exact.items()}], worker.footprint.exact_rows(rows)
            )
        parts += [(replace(frame, payload=b""), ledger.accept(frame)) for frame in frames]
    whole, partly = (KvMemory(worker.codec, worker.layout, 9, 3) for _ in range(2))
    fetched = Fetched(0, len(PAGES), 0)
    fetched.parts = tuple(parts)
    fetched.into(PAGES, 1, 0, rows).write(whole)
    before = {page: bytes_of(partly, page) for page in range(9)}
    fetched.into(PAGES, 1, first, rows).write(partly)
    for page in range(9):
        wanted = bytes_of(whole, page) if page in PAGES[first:] else before[page]
        assert all(map(torch.equal, bytes_of(partly, page), wanted))
    for one, other in zip(whole.pools, partly.pools, strict=True):
        assert torch.equal(one.open_k[1], other.open_k[1])
        assert bool((other.open_k[1] != 0).any()) == (worker.codec.window.pages > 1)
    assert any(not torch.equal(a, b) for a, b in zip(bytes_of(whole, 5), before[5], strict=True))
