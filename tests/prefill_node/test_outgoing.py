"""However the pages of a pass are gathered into frames, the same KV arrives, and no frame is larger than is agreed."""

from __future__ import annotations

import pytest

from hackkv import framing
from hackkv.types import KvFrame
from prefill_node import outgoing
from tests.pair import PI, SHARING, prompt
from tests.prefill_node.test_prefix import Bench, Served
from transport.coder import MAX_PLANES

IDS = prompt(1, 6 * PI + 5)


@pytest.mark.parametrize("codec", SHARING)
async def test_gathered_frames_bring_the_same_kv(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of one layer; of all layers; of few planes; of so few bytes that pages of a layer are cut."""
    assert outgoing.GATHERED_PLANES <= MAX_PLANES
    found = list[Served]()
    for layers, enough, planes, cap in (
        ({1}, 1, outgoing.GATHERED_PLANES, framing.MAX_FRAME_BYTES),
        ({2}, 1 << 20, outgoing.GATHERED_PLANES, framing.MAX_FRAME_BYTES),
        ({1, 2}, 1 << 20, 12, framing.MAX_FRAME_BYTES),
        ({1, 2}, 1 << 20, outgoing.GATHERED_PLANES, PI * 64),
    ):
        monkeypatch.setattr(outgoing, "GATHERED_PLANES", planes)
        monkeypatch.setattr(outgoing, "MAX_FRAME_BYTES", cap)
        monkeypatch.setattr(framing, "MAX_FRAME_BYTES", cap)
        frames = list[KvFrame]()
        async with Bench(codec, frame_bytes=enough, noted=frames.append) as bench:
            assert bench.worker.layout.num_layers == 2
            found.append(await bench.serve(IDS))
        assert {frame.layer_count for frame in frames} <= layers
        for frame in frames:
            alone = frame.page_count == frame.head_count == 1
            assert len(frame.planes) <= planes
            assert len(frame.payload) <= cap or alone
    assert all(each == found[0] for each in found)
