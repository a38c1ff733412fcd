"""Errors on a decode node, or on the way to it, fail the requests at fault and not the node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hack_kernels.base import Pool
from torch import Tensor

from hackkv.batch import Batch
from hackkv.errors import (
    HackkvError,
    HandshakeRefused,
    NonFiniteError,
    TransferError,
)
from hackkv.model.generate import generate
from hackkv.types import (
    DecodeJob,
    PrefillJob,
    Reserved,
    Token,
)
from tests.decode_node.calls import drain
from tests.pair import PI, GatedCodec, greedy, paired, poisoned, prompt, tiny_worker


async def test_nan_in_decode_fails_its_own_request_only() -> None:
    """A token that decode feeds back has NaN weights on this node. Its request ends, and its neighbours go on."""
    worker = tiny_worker("hack")
    requests = [greedy(f"r{n}", prompt(n, n), 10) for n in (5, PI, 50)]
    expected = [generate(worker, request) for request in requests]
    others = {token.token_id for tokens in (expected[0], expected[2]) for token in tokens}
    bad = next(token for token in expected[1][:-1] if token.token_id not in others)
    async with paired(worker, poisoned(worker, bad.token_id)) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests), return_exceptions=True)
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    assert f"K is nan at token {PI + bad.index}," in str(served[1])
    for result, tokens in ((served[0], expected[0]), (served[2], expected[2])):
        assert not isinstance(result, BaseException)
        assert result.tokens == tokens


async def test_a_prefill_node_that_drops_a_handoff_is_reported_to_the_decode_call() -> None:
    codec = GatedCodec()
    worker = tiny_worker("fp16")
    request = greedy("r", prompt(11, 3 * PI), 4)
    async with paired(replace(worker, codec=codec), worker, chunk_pages=1) as nodes:
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        sending = asyncio.create_task(drain(nodes, PrefillJob(request, "r", 0, nodes.address)))
        codec.permits.release(2)  # the first pass, at whose end a frame leaves
        for _ in range(3):
            await asyncio.to_thread(codec.reached)
        sending.cancel()
        with pytest.raises(TransferError, match="the prefill node: the sender of r went away"):
            await anext(events)
        codec.open()
        served = await nodes.serve(greedy("next", prompt(12, 5), 3))
        assert len(served.tokens) == 3
        await nodes.assert_idle()


async def test_different_settings_are_refused_by_name_on_both_sides() -> None:
    async with paired(tiny_worker("hack"), tiny_worker("hack-k4v2")) as nodes:
        request = greedy("r", prompt(13, 40), 4)
        events = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(events) == Reserved()
        named = "fingerprints differ in codec: 'hack-k4v2' here, 'hack' at the peer"
        with pytest.raises(HandshakeRefused, match=named):
            await drain(nodes, PrefillJob(request, "r", 0, nodes.address))
        with pytest.raises(HandshakeRefused, match=named):
            await anext(events)
        await nodes.prefill.close()
        assert (await nodes.decode.describe()).free_pages == 64


async def test_an_unexpected_error_fails_its_batch_and_not_the_node(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GatedCodec):
        def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if batch.where.starts[0] == 9:
                raise RuntimeError("boom")
            return super().attend(layer, pool, batch, q, k, v)

    codec = Broken()
    codec.open()
    worker = tiny_worker("fp16")
    async with paired(worker, replace(worker, codec=codec)) as nodes:
        with pytest.raises(HackkvError, match="decode failed: RuntimeError: boom"):
            await nodes.serve(greedy("r", prompt(14, 7), 6))
        served = await nodes.serve(greedy("next", prompt(15, 20), 3))
        assert [type(token) for token in served.tokens] == [Token] * 3
        await nodes.assert_idle()
    assert "a decode step failed" in caplog.text
