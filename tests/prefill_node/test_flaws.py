"""An error within a prefill pass fails the prompts at fault, but not their neighbours or the node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hack_kernels.base import Pool
from torch import Tensor

from hackkv.batch import Batch
from hackkv.errors import (
    HackkvError,
    NonFiniteError,
)
from hackkv.model.generate import generate
from hackkv.types import (
    Prefilled,
    PrefillJob,
)
from tests.pair import PI, GatedCodec, greedy, paired, poisoned, prompt, tiny_worker, unspeakable
from tests.prefill_node.calls import collect, prefill_only


async def test_nan_fails_its_own_request_only() -> None:
    """Of three prompts in one pass, the second has a token with NaN weights. It is named, and the others are unharmed.

    Frames that the others sent before the pass was repeated are not sent again: the decode node accepts the handoffs.
    """
    worker = poisoned(tiny_worker("hack"), 511)
    good = [greedy(f"g{n}", prompt(n, n), 5) for n in (PI + 3, 2 * PI)]
    bad = greedy("bad", (*prompt(8, 20), 511, *prompt(9, 20)), 5)
    async with paired(worker, chunk_pages=8) as nodes:
        served = await asyncio.gather(
            nodes.serve(good[0]), nodes.serve(bad), nodes.serve(good[1]), return_exceptions=True
        )
        await prefill_only(nodes.prefill, greedy("barrier", (3,), 1))
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    assert str(served[1]) == "layer 0: K is nan at token 20, KV head 0"
    for request, result in zip(good, (served[0], served[2]), strict=True):
        assert not isinstance(result, BaseException)
        assert result.tokens == generate(worker, request)


async def test_logits_that_are_not_finite_fail_their_own_request_only() -> None:
    """The error is found at the end of a pass, when all frames have left. The repeated pass must not send
    them twice, nor score the prompt twice."""
    worker = unspeakable(tiny_worker("hack", layers=1), 511)
    good = [greedy(f"g{n}", prompt(n, n), 5, prompt_logprobs=0) for n in (PI + 3, 2 * PI)]
    bad = greedy("bad", (*prompt(8, 20), 511), 5)
    async with paired(worker, chunk_pages=8) as nodes:
        served = await asyncio.gather(
            nodes.serve(good[0]), nodes.serve(bad), nodes.serve(good[1]), return_exceptions=True
        )
        alone = [await prefill_only(nodes.prefill, request) for request in good]
        await nodes.assert_idle()
    assert isinstance(served[1], NonFiniteError)
    for request, result, undisturbed in zip(good, (served[0], served[2]), alone, strict=True):
        assert not isinstance(result, BaseException), result
        assert result.tokens == generate(worker, request)
        assert len(result.prefilled.prompt_logprobs) == len(request.prompt_ids) - 1
        assert result.prefilled.prompt_logprobs == undisturbed.prompt_logprobs


async def test_a_cut_prompt_between_complete_ones_is_not_blamed_for_their_logits() -> None:
    """The pass has prompts [complete, cut, complete], and the third one's logits are not finite."""
    worker = unspeakable(tiny_worker("hack", layers=1), 511)
    requests = [
        greedy("complete", prompt(1, PI // 2), 1),
        greedy("cut", prompt(2, 3 * PI), 1),
        greedy("bad", (*prompt(3, 4), 511), 1),
    ]
    async with paired(worker, chunk_pages=2) as nodes:
        found = await asyncio.gather(
            *(prefill_only(nodes.prefill, request) for request in requests), return_exceptions=True
        )
        await nodes.assert_idle()
    assert isinstance(found[2], NonFiniteError)
    for request, event in zip(requests[:2], found[:2], strict=True):
        assert isinstance(event, Prefilled), event
        assert event.token == generate(worker, request)[0]


async def test_an_unexpected_error_fails_its_pass_and_not_the_node(caplog: pytest.LogCaptureFixture) -> None:
    worker = tiny_worker("fp16")

    class Broken(GatedCodec):
        def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if batch.spans[0].count == 7:
                raise RuntimeError("boom")
            return super().attend(layer, pool, batch, q, k, v)

    codec = Broken()
    codec.open()
    async with paired(replace(worker, codec=codec)) as nodes:
        with pytest.raises(HackkvError, match="prefill failed: RuntimeError: boom"):
            await collect(nodes.prefill.prefill(PrefillJob(greedy("r", prompt(14, 7), 4), "t", 0)))
        await prefill_only(nodes.prefill, greedy("next", (5,), 1))
        await nodes.assert_idle()
    assert "a prefill pass failed" in caplog.text
