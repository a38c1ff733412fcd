"""Alternatives are keyed by text, as OpenAI does; tokens that share a text must not hide the chosen one."""

from __future__ import annotations

from hackkv.tokenizer import Tokenizer
from hackkv.types import Logprob, Token
from router.api.completions import _row


def test_the_chosen_token_stands_for_its_text(tokenizer: Tokenizer) -> None:
    halves = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\ufffd"][:3]
    top = tuple(Logprob(token_id, -1.0 - rank) for rank, token_id in enumerate(halves))
    for rank, token_id in enumerate(halves):
        text, logprob, alternatives = _row(tokenizer, Token(0, token_id, None, -1.0 - rank, top))
        assert (text, logprob, alternatives) == ("\ufffd", -1.0 - rank, {"\ufffd": -1.0 - rank})


def test_the_most_probable_of_equal_texts_stands_for_them(tokenizer: Tokenizer) -> None:
    halves = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\ufffd"][:2]
    letter = tokenizer.encode("q", add_special_tokens=False)[0]
    top = (Logprob(letter, -0.5), Logprob(halves[0], -1.0), Logprob(halves[1], -2.0))
    assert _row(tokenizer, Token(0, letter, None, -0.5, top))[2] == {"q": -0.5, "\ufffd": -1.0}
