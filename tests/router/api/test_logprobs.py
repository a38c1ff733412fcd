"""Log-probabilities of completions: tokens by name, also those that are parts of characters, and where they begin."""

from __future__ import annotations

import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.tokenizer import Tokenizer
from router.api import reply
from router.api.completions import CompletionRenderer, _row, token_name
from router.api.reply import PIECE, SMALL, Rows, to_json, to_json_in_pieces
from tests.router.conftest import INSIDE, Api, Inside

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
    top = [(token_id, -1.0 - rank) for rank, token_id in enumerate(halves)]
    for rank, token_id in enumerate(halves):
        name, logprob, alternatives = _row(partial(token_name, tokenizer), token_id, -1.0 - rank, top)
        assert (name, logprob) == (token_name(tokenizer, token_id), -1.0 - rank)
        assert alternatives == {token_name(tokenizer, other): value for other, value in top}


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["<|turn|>a <|turn|> é", "<|turn|>", "a🦊<|turn|>b"])
async def test_offsets_point_into_an_echoed_text_that_holds_special_tokens(api: Api, text: str, stream: bool) -> None:
    ids = api.tokenizer.encode(text)
    assert api.tokenizer.special_ids & set(ids)
    body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0, "stream": stream}
    response = await api.http.post("/v1/completions", json=body)
    choice = json.loads(response.text.split("\n\n")[0][6:])["choices"][0] if stream else response.json()["choices"][0]
    assert choice["text"].startswith(text)
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice["text"].startswith(token, offset) or token.startswith("bytes:")
    assert offsets[: len(ids)] == sorted(offsets[: len(ids)])
    assert offsets[len(ids)] == len(text)


@INSIDE
@pytest.mark.parametrize("logprobs", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt_tokens", [SMALL - 2, SMALL + 2])
async def test_a_long_echo_is_written_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, stream: bool, logprobs: int
) -> None:
    """And says what a short one says."""
    writers, written = list[bool](), CompletionRenderer._logprobs

    def watched(*given: Any) -> Any:
        writers.append(threading.current_thread() is threading.main_thread())
        return written(*given)

    monkeypatch.setattr(CompletionRenderer, "_logprobs", watched)
    ids = api.tokenizer.encode("ab" * (prompt_tokens // 2), add_special_tokens=False)
    body = {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": logprobs, "stream": stream}
    response = await api.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = json.loads(response.text.split("\n\n")[0][6:])["choices"][0] if stream else response.json()["choices"][0]
    assert writers[0] is (prompt_tokens < SMALL)
    columns, names = choice["logprobs"], [token_name(api.tokenizer, token_id) for token_id in ids]
    assert columns["tokens"][:prompt_tokens] == names
    assert columns["token_logprobs"][:prompt_tokens] == [None, *[-1.0] * (prompt_tokens - 1)]
    assert columns["text_offset"][:prompt_tokens] == [len("".join(names[:nth])) for nth in range(prompt_tokens)]
    best = {token_name(api.tokenizer, 1): -0.5} if logprobs else {}
    assert columns["top_logprobs"][:prompt_tokens] == [None, *({**best, name: -1.0} for name in names[1:])]


@INSIDE
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_long_answers_are_encoded_a_few_rows_at_a_time_and_beside_the_event_loop(
    api: Inside, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Of many choices, too; what the last events of a stream repeat is written there as well."""
    tokens, n, sizes = SMALL // 2 - 1, 1 if "responses" in path else 3, {True: [0], False: [0]}
    encode = reply._ENCODER.encode

    def watched(value: Any) -> str:
        written = encode(value)
        sizes[threading.current_thread() is threading.main_thread()].append(len(written))
        return written

    monkeypatch.setattr(reply, "_ENCODER", SimpleNamespace(encode=watched))
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "logprobs": 20, "n": n, "max_tokens": tokens},
        "/v1/chat/completions": {
            "messages": messages, "logprobs": True, "top_logprobs": 20, "n": n, "max_tokens": tokens,
        },
        "/v1/responses": {
            "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20,
            "max_output_tokens": 3 * tokens,
        },
    }[path]  # fmt: skip
    api.cluster.script.answer = lambda request: [97] * request.sampling.max_tokens
    response = await api.http.post(path, json={**asked, "stream": stream, "seed": 1})
    assert response.status_code == 200, response.text
    here, beside, row = sum(sizes[True]), sum(sizes[False]), len(response.content) / (3 * tokens)
    assert here + beside > 0.8 * len(response.content)
    assert max(sizes[False]) < 2 * PIECE * row
    if not stream:
        assert here == 0
    elif path == "/v1/responses":
        assert beside > 3 * here


LEAVES = (
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec=None))
)
ROWS = st.builds(lambda row, count: Rows([row] * count), LEAVES | st.lists(LEAVES), st.integers(0, 2 * PIECE + 1))
VALUES = st.recursive(LEAVES | ROWS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.dictionaries(st.text(), VALUES))
def test_pieces_are_the_json(value: dict[str, Any]) -> None:
    assert to_json_in_pieces(value) == to_json(value)
