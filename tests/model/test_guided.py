"""Guided requests through both nodes have the tokens of an undisturbed run, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits

from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import GuideError, RequestError
from hackkv.guide import Guides
from hackkv.model.generate import generate
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.tokenizer import Tokenizer
from hackkv.types import MAX_GRAMMAR_CHARS, Finish, Request, Sampling, Token
from tests.decode_node.calls import go_on_in_few_pages
from tests.pair import PI, greedy, paired, prompt
from transport.convert_request import pack_request, unpack_request

REGEX = "([a-z]{3} ){80}[0-9]{2}"
GRAMMAR = LLMatcher.grammar_from_regex(REGEX)


@cache
def folder() -> Path:
    """A checkpoint that is kept: guides read its tokenizer when the first grammar comes."""
    FOLDERS.append(TemporaryDirectory())
    return write_tiny(Path(FOLDERS[-1].name), Tiny(max_context=1024))


FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def worker() -> Worker:
    """A tiny FP32 model."""
    return load_worker(
        ModelConfig(path=str(folder()), dtype="float32"), CodecConfig(name="hack", settings={"page_tokens": PI})
    )


def guided(name: str, seed: int, length: int = 10, **sampling: object) -> Request:
    """A request that draws about 150 tokens that match `REGEX`."""
    request = greedy(name, prompt(seed, length), 400, grammar=GRAMMAR, temperature=0.9, seed=seed)
    return replace(request, sampling=replace(request.sampling, **sampling))  # type: ignore[arg-type]


def text(tokens: list[Token]) -> str:
    """The answer, without the token that ended it."""
    ids = [token.token_id for token in tokens if token.finish is not Finish.STOP]
    return Tokenizer(folder()).decode(ids)


@cache
def whole(request: Request) -> tuple[Token, ...]:
    """The tokens of the undisturbed run."""
    return tuple(generate(worker(), request))


async def test_it_matches_and_equals_the_reference_beside_requests_without_grammar() -> None:
    requests = [guided("a", 1), greedy("b", prompt(2, 40), 30), guided("c", 3, logprobs=2), guided("d", 4, top_k=5)]
    async with paired(worker()) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests))
        await nodes.assert_idle()
    for request, result in zip(requests, served, strict=True):
        assert tuple(result.tokens) == whole(request)
        if request.sampling.grammar:
            assert re.fullmatch(REGEX, text(result.tokens))
            assert result.tokens[-1].finish is Finish.STOP


@pytest.mark.parametrize("cut", [1, 2, PI, PI + 1, 70])
async def test_a_replay_goes_on_where_its_grammar_was(cut: int) -> None:
    request = guided("r", 5)
    emitted = tuple(token.token_id for token in whole(request)[:cut])
    async with paired(worker()) as nodes:
        served = await nodes.serve(request, epoch=1, emitted=emitted)
        await nodes.assert_idle()
    assert tuple(served.tokens) == whole(request)[cut:]


DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 60, "maxItems": 60}
DOCUMENT = LLMatcher.grammar_from_json_schema(DIGITS, overrides={"whitespace_flexible": False})


@pytest.mark.parametrize("cut", [0, PI], ids=["swapped", "swapped and replayed"])
async def test_a_swapped_document_is_valid_and_that_of_a_calm_run(cut: int) -> None:
    requests = [guided(f"s{seed}", seed, 10 + seed, grammar=DOCUMENT, max_tokens=8 * PI) for seed in range(5)]
    served = await go_on_in_few_pages(worker(), requests, cut, num_pages=10)
    for request, result in zip(requests, served, strict=True):
        document = text([*whole(request)[:cut], *result.tokens])
        jsonschema.validate(json.loads(document), DIGITS)


async def test_an_output_that_is_cut_says_so() -> None:
    (*_, last) = whole(guided("cut", 6, max_tokens=7))
    assert (last.index, last.finish) == (6, Finish.LENGTH)


@pytest.mark.parametrize("min_tokens", [3, 50])
async def test_min_tokens_makes_answers_longer_only_where_the_grammar_allows_more(min_tokens: int) -> None:
    longer = LLMatcher.grammar_from_regex("[a-z]{1,10}")
    tokens = whole(guided("m", 7, min_tokens=min_tokens, grammar=longer, max_tokens=60))
    assert re.fullmatch("[a-z]{1,10}" if min_tokens == 3 else "[a-z]{10}", text(list(tokens)))
    assert tokens[-1].finish is Finish.STOP
    assert len(tokens) > 3


async def test_end_tokens_end_a_guided_answer_always() -> None:
    tokens = whole(guided("e", 8, ignore_eos=True))
    assert tokens[-1].finish is Finish.STOP
    assert re.fullmatch(REGEX, text(list(tokens)))


async def test_a_guide_that_fails_ends_its_own_request_only() -> None:
    """Guides fail on either node: the regex exceeds the fuel of a step at once, or at a later state."""
    frugal = LLParserLimits(step_lexer_fuel=100, precompute_large_lexemes=False, verbose_errors=False)
    poor = replace(worker(), guides=Guides(folder(), worker().model.spec.eos_ids, frugal))
    hard = guided("hard", 9, grammar=LLMatcher.grammar_from_regex("(a|b)*a(a|b){30}c"))
    bystander = greedy("bystander", prompt(2, 40), 30)
    async with paired(poor) as nodes:
        failed, served = await asyncio.gather(nodes.serve(hard), nodes.serve(bystander), return_exceptions=True)
        assert isinstance(failed, GuideError)
        assert not isinstance(served, BaseException)
        await nodes.assert_idle()
    assert tuple(served.tokens) == whole(bystander)


async def test_a_grammar_that_is_wrong_is_refused_by_the_node() -> None:
    async with paired(worker()) as nodes:
        with pytest.raises(RequestError, match="unknown name"):
            await nodes.serve(guided("w", 1, grammar="start: nothing"))
        await nodes.assert_idle()


def test_a_grammar_crosses_the_wire_unless_it_is_too_long() -> None:
    request = guided("x", 1)
    assert unpack_request(pack_request(request)) == request
    too_long = Request("x", (1,), Sampling(0, 1, grammar="x" * (MAX_GRAMMAR_CHARS + 1)))
    with pytest.raises(ValueError, match="grammar"):
        unpack_request(pack_request(too_long))
