"""Log-probabilities of completions: tokens by name, also those that are parts of characters, and where they begin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hackkv.tokenizer import Tokenizer
from hackkv.types import Logprob, Token
from router.api.completions import _row, token_name
from tests.router.conftest import Api

TEXT = "a🦊é b"


def broken(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are no whole characters."""
    return [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i)]


def test_a_part_of_a_character_is_named_by_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊", add_special_tokens=False)
    assert [token_name(tokenizer, i) for i in ids] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x8a"]
    names = [token_name(tokenizer, i) for i in broken(tokenizer)]
    assert len(set(names)) == len(names) >= 128


def test_the_chosen_token_and_its_alternatives_each_have_a_name(tokenizer: Tokenizer) -> None:
    halves = broken(tokenizer)[:3]
    top = tuple(Logprob(token_id, -1.0 - rank) for rank, token_id in enumerate(halves))
    for rank, token_id in enumerate(halves):
        name, logprob, alternatives = _row(tokenizer, Token(0, token_id, None, -1.0 - rank, top))
        assert (name, logprob) == (token_name(tokenizer, token_id), -1.0 - rank)
        assert alternatives == {token_name(tokenizer, other.token_id): other.logprob for other in top}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_point_into_the_text_also_within_characters(api: Api, stream: bool, echo: bool) -> None:
    ids = api.tokenizer.encode(TEXT, add_special_tokens=False)
    api.cluster.script.answer = lambda request: ids
    body = {"prompt": ids, "max_tokens": len(ids), "echo": echo, "logprobs": 0, "stream": stream}
    response = await api.http.post("/v1/completions", json=body)
    choices: list[Any] = (
        [json.loads(line[6:])["choices"][0] for line in response.text.split("\n\n")[:-2]]
        if stream
        else response.json()["choices"]
    )
    text = "".join(choice["text"] for choice in choices)
    assert text == TEXT * (1 + echo)
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    whole = "".join(char * len(char.encode()) for char in TEXT)  # one token a byte: "a", the fox four times, ...
    assert "".join(text[offset] for offset in offsets) == whole * (1 + echo)
    once = [offset for offset in offsets if offset < len(TEXT)]
    assert once == [0, 1, 1, 1, 1, 2, 2, 3, 4]
