"""Log-probabilities of completions: names of tokens, also of parts of characters, and the offsets of tokens."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.tokenizer import Tokenizer
from router.api import reply, sse
from router.api.completions import alternatives, token_name
from router.api.reply import PIECE, SMALL, TokenRows, to_json, to_json_in_slices
from tests.router.conftest import INSIDE, Api, Inside

TEXT = "a🦊é b"


def broken(tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are not whole characters."""
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
        found = alternatives(partial(token_name, tokenizer), token_id, -1.0 - rank, top)
        assert found == {token_name(tokenizer, other): value for other, value in top}


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


@pytest.mark.parametrize("logprobs", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt_tokens", [SMALL - 2, SMALL + 2])
async def test_a_long_echo_says_what_a_short_one_says(
    api: Api, prompt_tokens: int, stream: bool, logprobs: int
) -> None:
    ids = api.tokenizer.encode("ab" * (prompt_tokens // 2), add_special_tokens=False)
    body = {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": logprobs, "stream": stream}
    response = await api.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = json.loads(response.text.split("\n\n")[0][6:])["choices"][0] if stream else response.json()["choices"][0]
    columns, names = choice["logprobs"], [token_name(api.tokenizer, token_id) for token_id in ids]
    assert columns["tokens"][:prompt_tokens] == names
    assert columns["token_logprobs"][:prompt_tokens] == [None, *[-1.0] * (prompt_tokens - 1)]
    assert columns["text_offset"][:prompt_tokens] == [len("".join(names[:nth])) for nth in range(prompt_tokens)]
    best = {token_name(api.tokenizer, 1): -0.5} if logprobs else {}
    assert columns["top_logprobs"][:prompt_tokens] == [None, *({**best, name: -1.0} for name in names[1:])]
    assert {len(column) for column in columns.values()} == {prompt_tokens + (1 if stream else 2)}


@INSIDE
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [SMALL // 3 - 1, SMALL])
async def test_others_run_while_a_long_answer_is_written(
    api: Inside, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool, tokens: int
) -> None:
    """Rows are written a few at a time, also with many choices, and also in the last events of a stream, which repeat
    the answer."""
    encode, slices, sizes = to_json, Counter[int](), [0]
    nth = 0

    async def others() -> None:
        nonlocal nth
        while True:
            nth += 1
            await asyncio.sleep(0)

    def watched(value: Any) -> bytes:
        written = encode(value)
        slices[nth] += len(written)
        sizes.append(len(written))
        return written

    for module in (reply, sse):
        monkeypatch.setattr(module, "to_json", watched)
    monkeypatch.setattr(reply, "SLICE_S", 0.0)
    n = 1 if path == "/v1/responses" else 3
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "logprobs": 20, "n": n, "max_tokens": tokens},
        "/v1/chat/completions": {
            "messages": messages, "logprobs": True, "top_logprobs": 20, "n": n, "max_tokens": tokens,
        },
        "/v1/responses": {
            "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": tokens,
        },
    }[path]  # fmt: skip
    api.cluster.script.answer = lambda request: [97] * request.sampling.max_tokens
    waiting = asyncio.create_task(others())
    response = await api.http.post(path, json={**asked, "stream": stream, "seed": 1})
    waiting.cancel()
    assert response.status_code == 200, response.text
    assert sum(slices.values()) > 0.8 * len(response.content)
    if stream and path != "/v1/responses":  # each event tells of one token
        return
    parts = 4 if stream else 1  # this stream has the answer three times, and once token by token
    few = 2 * PIECE * len(response.content) / parts / (n * tokens)
    if n * tokens > SMALL:
        assert max(slices.values()) < few
    elif not stream:
        assert max(sizes) == sum(slices.values())


LEAVES = (
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec=None))
)
ROWS = st.builds(lambda row, count: (row,) * count, LEAVES | st.lists(LEAVES), st.integers(0, 2 * PIECE + 1))
VALUES = st.recursive(LEAVES | ROWS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@given(st.dictionaries(st.text(), VALUES))
async def test_json_that_is_written_in_slices_is_the_json(value: dict[str, Any]) -> None:
    written = await to_json_in_slices(read_twice(value))
    assert written == to_json(read_twice(value)) == to_json(listed(value))


def listed(value: Any) -> Any:
    """`value` with lists in place of rows."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


def read_twice(value: Any) -> Any:
    """`value` with `TokenRows` in place of tuples. They are new, since each can be read only once."""
    if isinstance(value, dict):
        return {key: read_twice(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_twice(item) for item in value]
    return TokenRows(iter(value)) if isinstance(value, tuple) else value
