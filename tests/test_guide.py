"""Guides against Python's own regular expressions and JSON, and their promises of replay and bounded cost."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from hackkv.errors import CheckpointError, GuideError, RequestError
from hackkv.guide import KEPT_GRAMMARS, Guide, Guides
from hackkv.model.sampler import SamplerState, masks
from hackkv.packaged import SHIPPED
from hackkv.tokenizer import Tokenizer
from hackkv.types import Sampling

VOCAB, EOS = 4096, (0, 5)
REGEXES = (r"[0-9]{3}-[a-z]{4}", r"(yes|no)( sir)?", r"[a-c]{0,6}é?", r"x")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "é", None]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def guides() -> Guides:
    """Guides for the vocabulary of the model in the repository, with two end tokens."""
    return Guides(SHIPPED, EOS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer of the same vocabulary, which decodes by the library that made it."""
    return Tokenizer(SHIPPED)


def ids(guide: Guide) -> list[int]:
    """Ids of tokens that may come next."""
    return np.flatnonzero(np.unpackbits(guide.allowed(), bitorder="little")).tolist()


def walk(guide: Guide, seed: int) -> list[int]:
    """A random output, up to its end token."""
    rng, output = random.Random(seed), list[int]()
    while not output or output[-1] not in EOS:
        output.append(rng.choice(ids(guide)))
        guide.accept(output[-1])
    return output


@pytest.mark.parametrize("regex", REGEXES)
def test_whatever_is_chosen_matches_and_may_end_only_there(guides: Guides, tokenizer: Tokenizer, regex: str) -> None:
    grammar = LLMatcher.grammar_from_regex(regex)
    for seed in range(30):
        output = walk(guides.open(grammar), seed)
        guide = guides.open(grammar)
        for at, token_id in enumerate(output):
            may_end = re.fullmatch(regex, tokenizer.decode(output[:at])) is not None
            assert [end in ids(guide) for end in EOS] == [may_end, may_end]
            guide.accept(token_id)
        assert re.fullmatch(regex, tokenizer.decode(output[:-1]))


def test_a_guide_is_a_function_of_grammar_and_tokens(guides: Guides) -> None:
    """A guide that is rebuilt after any prefix allows the same tokens as the guide that accepted all of them."""
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    output = walk(guides.open(grammar), 3)
    assert len(output) > 3
    going = guides.open(grammar)
    for at, token_id in enumerate(output[:-1]):
        assert np.array_equal(guides.open(grammar, output[:at]).allowed(), going.allowed())
        going.accept(token_id)


def test_a_token_that_the_grammar_does_not_allow_is_an_error(guides: Guides, tokenizer: Tokenizer) -> None:
    (wrong,) = tokenizer.encode("x")
    with pytest.raises(GuideError, match=f"does not allow token {wrong}"):
        guides.open(LLMatcher.grammar_from_regex("[0-9]+"), [wrong])


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (LLMatcher.grammar_from_regex("[0-9"), "unclosed character class"),
        (LLMatcher.grammar_from_json_schema({"type": 12}), "type must be a string"),
        (LLMatcher.grammar_from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (LLMatcher.grammar_from_json_schema({"enum": [str(number) for number in range(100_000)]}), "too big"),
        ("start: nothing", 'unknown name: "nothing"'),
        ("", "Empty grammar"),
    ],
)
def test_grammars_that_are_wrong_or_too_large_are_refused_with_the_reason(
    guides: Guides, grammar: str, why: str
) -> None:
    with pytest.raises(RequestError, match=why) as refusal:
        guides.open(grammar)
    assert "\n" not in str(refusal.value)


def test_a_step_that_would_take_too_long_is_an_error() -> None:
    """The regex needs more states than the limit allows, but only after some tokens."""
    frugal = LLParserLimits(step_lexer_fuel=100, precompute_large_lexemes=False, verbose_errors=False)
    guide = Guides(SHIPPED, EOS, frugal).open(LLMatcher.grammar_from_regex("(a|b)*a(a|b){30}c"))
    with pytest.raises(GuideError, match="cannot go on"):
        walk(guide, 0)


def test_a_tokenizer_that_llguidance_cannot_read_is_named(tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Guides(SHIPPED.parent).open('start: "a"')


async def test_grammars_open_beside_the_loop_and_the_latest_stay_compiled(guides: Guides) -> None:
    assert await guides.opened("") is None
    for number in range(KEPT_GRAMMARS + 5):
        guide = await guides.opened(f'start: "{number}"')
        assert guide is not None
    assert len(guides._compiled) == KEPT_GRAMMARS


@pytest.mark.parametrize("vocab", [31, 32, 500, 10_000])
def test_a_mask_has_a_bit_for_each_token_and_none_for_rows_without_a_grammar(guides: Guides, vocab: int) -> None:
    """The model may have fewer tokens than the tokenizer, or more."""
    bits = guides.open(LLMatcher.grammar_from_regex("[a-z]+")).allowed()
    sampling = Sampling(seed=0, max_tokens=9)
    guided = SamplerState(sampling, [], EOS, guide=guides.open(LLMatcher.grammar_from_regex("[a-z]+")))
    found = masks([SamplerState(sampling, [], EOS), guided], vocab)
    assert found is not None
    assert found[0].eq(-1).all()
    ids = np.flatnonzero(np.unpackbits(found[1].numpy().view(np.uint8), bitorder="little"))
    wanted = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert ids.tolist() == [at for at in wanted.tolist() if at < found.shape[1] * 32]
    assert masks([SamplerState(sampling, [], EOS)], vocab) is None
