"""Both nodes on the Triton backend, on a GPU or interpreted: prefill, wire, decode, swap, replay and failover give the
tokens of the reference backend. Other tests check the same for the CPU's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

pytest.importorskip("triton")

from hackkv.codec import rows_held
from hackkv.model.generate import generate
from hackkv.model.worker import Worker
from hackkv.types import DecodeJob, HandedOff, Landed, Prefilled, PrefillJob, Request, Reserved, Token
from tests.decode_node.calls import begun_together, close, held_up
from tests.on_triton import served
from tests.pair import DECODING, PI, Pair, greedy, paired, prompt, tiny_worker
from transport.closing import closing

PATIENCE_S: Final = 3600.0
"""Interpreted, a pass may take a minute on a busy machine."""
pytestmark = pytest.mark.timeout(PATIENCE_S)


def workers(codec: str) -> tuple[Worker, Worker]:
    """A tiny worker on Triton, and one with the same weights that computes by the definitions."""
    return tiny_worker(codec, layers=1, backend="triton"), tiny_worker(codec, layers=1, backend="reference")


def sampled(request: Request, seed: int) -> Request:
    """The request, sampled with settings that depend on the output so far."""
    sampling = replace(request.sampling, temperature=0.8, seed=seed, presence_penalty=0.4, repetition_penalty=1.2)
    return replace(request, sampling=replace(sampling, top_p=0.9, min_p=0.01, logprobs=2))


async def test_one_request_equals_the_reference() -> None:
    """One page of the prompt travels sealed. The first token fills the second page, and the next token reads it."""
    on_triton, reference = workers("hack")
    request = greedy("r", prompt(1, 2 * PI - 1), 3, ignore_eos=True)
    async with paired(on_triton, timeout_s=PATIENCE_S) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.tokens == generate(reference, request)


@pytest.mark.slow
@pytest.mark.parametrize("codec", served())
async def test_swaps_and_replays_equal_the_reference(codec: str) -> None:
    """Four sequences share five eighths of the pages that they need: two each, or one if most rows of their prompts are
    evicted. All began on another node, and two are sampled."""
    on_triton, reference = workers(codec)
    requests = [greedy(f"r{i}", prompt(i, PI - 3 + i), PI + 6, ignore_eos=True) for i in range(4)]
    requests = [sampled(request, i) if i % 2 else request for i, request in enumerate(requests)]
    whole = [generate(reference, request) for request in requests]
    known = [PI, PI - 1, PI, PI + 1]
    filled = sum((rows_held(on_triton.codec, len(each.prompt_ids)) + PI + 5) // PI for each in requests)
    decode, begin = held_up(on_triton, PATIENCE_S)
    async with paired(on_triton, decode, num_pages=5 * filled // 8, timeout_s=PATIENCE_S) as nodes:
        emitted = [ids(tokens[:cut]) for tokens, cut in zip(whole, known, strict=True)]
        served = await begun_together(nodes, begin, requests, emitted, PATIENCE_S)
        await nodes.assert_idle()
    assert sum(result.swaps for result in served) > 0
    for result, tokens, cut in zip(served, whole, known, strict=True):
        assert ids(result.tokens) == ids(tokens[cut:])


@pytest.mark.slow
@pytest.mark.parametrize("codec", served())
async def test_kept_kv_serves_a_second_decode_node(codec: str) -> None:
    """The first node is lost after some tokens. The prompt is computed once, and all of its KV is sent again."""
    on_triton, reference = workers(codec)
    request = greedy("r", prompt(2, PI + 3), 8, ignore_eos=True)
    expected = generate(reference, request)
    forgetful = DECODING.model_copy(update={"prefix_cache": False})
    async with paired(on_triton, decoding=forgetful, timeout_s=PATIENCE_S) as nodes:
        lost = nodes.decode.decode(DecodeJob(request, "t", 0))
        assert await anext(lost) == Reserved()
        async with closing(nodes.prefill.prefill(PrefillJob(request, "t", 0, nodes.address))) as events:
            first = await anext(events)
            assert isinstance(first, Prefilled)
            handed_off = await anext(events)
            assert isinstance(handed_off, HandedOff)
            assert await anext(lost) == Landed(handed_off.receipt)
            said = [first.token, *[await anext(lost) for _ in range(3)]]
            await close(lost)
            assert said == expected[:4]
            rest = await again(nodes, request, tuple(token.token_id for token in expected[:4]))
            assert isinstance(await anext(events), HandedOff)
        assert rest == expected[4:]
        await nodes.assert_idle()


async def again(nodes: Pair, request: Request, emitted: tuple[int, ...]) -> list[Token]:
    """The rest of a request, from KV that the prefill node kept."""
    async with closing(nodes.decode.decode(DecodeJob(request, "t", 1, emitted))) as decoding:
        assert await anext(decoding) == Reserved()
        await nodes.prefill.assign("t", 1, nodes.address)
        return [event async for event in decoding if isinstance(event, Token)]


def ids(tokens: list[Token]) -> tuple[int, ...]:
    return tuple(token.token_id for token in tokens)
