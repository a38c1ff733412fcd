"""A request that another node began goes on here with the same tokens, wherever it was cut off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from decode_node.config import DecodeSettings
from hackkv.codecs import CODECS
from hackkv.errors import RequestError, TransferError
from hackkv.model.generate import generate
from hackkv.types import DecodeJob, Finish, Request, Reserved, Token
from tests.decode_node.calls import go_on_in_few_pages
from tests.pair import PI, Pair, greedy, paired, prompt, tiny_worker

CUTS = (1, 2, PI - 1, PI, PI + 1, 2 * PI, 3 * PI + 5)
PROMPTS = (5, PI)
MORE = 6


def request_for(prompt_tokens: int, sampled: bool, max_tokens: int) -> Request:
    """A request that is greedy, or sampled with settings that depend on the output so far."""
    request = greedy("r", prompt(prompt_tokens, prompt_tokens), max_tokens, ignore_eos=True)
    if not sampled:
        return request
    sampling = replace(request.sampling, temperature=0.8, seed=3, presence_penalty=0.4, repetition_penalty=1.2)
    return replace(request, sampling=sampling)


async def replayed(nodes: Pair) -> float:
    """The number of tokens that the node has replayed."""
    return dict((await nodes.decode.describe()).stats)["hackkv_replayed_tokens_total"]


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
async def test_it_goes_on_after_any_token_with_the_tokens_of_an_undisturbed_run(codec: str) -> None:
    """Requests are cut at every kind of place in a page. All go on at once, beside a request that only decodes. No two
    share pages."""
    worker = tiny_worker(codec)
    undisturbed = {
        kind: generate(worker, request_for(*kind, max(CUTS) + MORE)) for kind in product(PROMPTS, (False, True))
    }
    cuts = [(length, cut) for length in PROMPTS for cut in CUTS]
    requests, whole = list[Request](), list[list[Token]]()
    for index, (length, cut) in enumerate(cuts):
        kind = length, index % 2 == 0
        requests.append(replace(request_for(*kind, cut + MORE), request_id=f"r{index}", cache_salt=f"r{index}"))
        *tokens, last = undisturbed[kind][: cut + MORE]
        whole.append([*tokens, replace(last, finish=Finish.LENGTH)])
    bystander = greedy("bystander", prompt(99, 40), 30)
    decoding = DecodeSettings(max_sequences=32, max_batch=32, replay_tokens=2 * PI)
    async with paired(worker, num_pages=256, decoding=decoding) as nodes:
        beside = asyncio.create_task(nodes.serve(bystander))
        served = await asyncio.gather(
            *(
                nodes.serve(request, epoch=1, emitted=tuple(token.token_id for token in tokens[:cut]))
                for request, tokens, (_, cut) in zip(requests, whole, cuts, strict=True)
            )
        )
        assert (await beside).tokens == generate(worker, bystander)
        # The last emitted token is the next input, also without a replay.
        assert await replayed(nodes) == sum(cut - 1 for _, cut in cuts)
        await nodes.assert_idle()
    for result, tokens, (_, cut) in zip(served, whole, cuts, strict=True):
        assert result.tokens == tokens[cut:]


async def test_replays_and_swaps_together_change_nothing() -> None:
    """Sequences that grow to 20 pages share eight."""
    worker = tiny_worker("hack")
    requests = [greedy(f"r{i}", prompt(i, 10 + i), 3 * PI, ignore_eos=True) for i in range(5)]
    await go_on_in_few_pages(worker, requests, PI, num_pages=8)


async def test_a_replay_that_begins_with_another_token_is_refused() -> None:
    """Token 0 differs from the one that the client has, so its stream cannot go on here."""
    worker = tiny_worker("hack")
    request = greedy("r", prompt(1, 40), 9)
    first = generate(worker, request)[0].token_id
    async with paired(worker) as nodes:
        with pytest.raises(TransferError, match=f"token 0 was {first + 1} and is {first} now"):
            await nodes.serve(request, emitted=(first + 1, 7))
        assert dict((await nodes.decode.describe()).stats)["hackkv_replays_diverged_total"] == 1
        await nodes.assert_idle()


@pytest.mark.parametrize(
    ("emitted", "named"),
    [
        ((5, 512), "a token id outside 0..511"),
        ((5, -1), "outside 0..511"),
        ((5,) * 4, "4 of 4 tokens are chosen already"),
    ],
)
async def test_a_replay_that_makes_no_sense_is_refused_at_once(emitted: tuple[int, ...], named: str) -> None:
    async with paired(tiny_worker("hack")) as nodes:
        events = nodes.decode.decode(DecodeJob(greedy("r", (5,), 4), "r", 1, emitted))
        with pytest.raises(RequestError, match=named):
            await anext(events)
        await nodes.assert_idle()


async def test_a_later_epoch_takes_the_place_of_one_that_still_lands() -> None:
    """The router has moved on before this node learns that the first call is over."""
    worker = tiny_worker("hack")
    request = greedy("r", prompt(1, 40), 5)
    async with paired(worker) as nodes:
        old = nodes.decode.decode(DecodeJob(request, "r", 0))
        assert await anext(old) == Reserved()
        served = await nodes.serve(request, epoch=1)
        with pytest.raises(TransferError, match="transfer r has moved on to epoch 1"):
            await anext(old)
        assert served.tokens == generate(worker, request)
        await nodes.assert_idle()
