"""Work that grows with a request runs in slices. Between them the event loop runs other tasks; results are equal."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from hackkv.tokenizer import Tokenizer
from router.api import parsers, reply
from router.api.generation import SETTLED_AT_ONCE
from router.api.schema import CompletionRequest
from router.watch.journal import Journal
from tests.router.conftest import INSIDE, Inside

MANY = 3 * SETTLED_AT_ONCE


async def sent(api: Inside, **body: Any) -> list[dict[str, Any]]:
    """The messages that the application sends in answer to a completion request."""
    data = json.dumps({"prompt": "x"} | body).encode()
    arriving, messages = [{"type": "http.request", "body": data, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> Any:
        return arriving.pop() if arriving else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await api.app(scope, receive, send)
    return messages


@INSIDE
@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
async def test_an_answer_is_sent_in_pieces(api: Inside, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "SENT_AT_ONCE", at_once)
    begun, *pieces = await sent(api, max_tokens=8, seed=1, logprobs=2)
    bodies = [piece["body"] for piece in pieces]
    length = sum(map(len, bodies))
    assert dict(begun["headers"])[b"content-length"] == str(length).encode()
    assert all(len(body) == min(at_once, length) for body in bodies[:-1])
    assert 0 < len(bodies[-1]) <= at_once
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert json.loads(b"".join(bodies))["usage"]["completion_tokens"] == 8


@INSIDE
async def test_the_text_of_an_echoed_prompt_of_ids_is_found_beside_the_event_loop(
    api: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, threads, decode = list(range(97, 117)), set[threading.Thread](), Tokenizer.decode

    def noting(tokenizer: Tokenizer, given: Sequence[int], **options: Any) -> str:
        if list(given) == ids:
            threads.add(threading.current_thread())
        return decode(tokenizer, given, **options)

    monkeypatch.setattr(Tokenizer, "decode", noting)
    _, *pieces = await sent(api, prompt=ids, echo=True, max_tokens=1)
    text = json.loads(b"".join(piece["body"] for piece in pieces))["choices"][0]["text"]
    assert text.startswith(decode(api.tokenizer, ids))
    assert threads
    assert threading.main_thread() not in threads


async def settle_beside(api: Inside, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool) -> list[int]:
    """Answer a request of many sequences. Returns how many were counted each time that another task ran."""
    counted, seen, over = 0, list[int](), asyncio.Event()
    count = Journal.ended

    def ended(*arguments: Any) -> None:
        nonlocal counted
        counted += 1
        count(*arguments)

    monkeypatch.setattr(Journal, "ended", ended)

    async def beside() -> None:
        while not over.is_set():
            seen.append(counted)
            if cancelled and counted:
                answering.cancel()
            await asyncio.sleep(0)

    answering = asyncio.create_task(sent(api, max_tokens=2, n=MANY))
    watching = asyncio.create_task(beside())
    await asyncio.wait([answering])
    over.set()
    await watching
    assert answering.cancelled() is cancelled
    assert counted == MANY
    return seen


@INSIDE
async def test_many_sequences_are_counted_in_slices(api: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await settle_beside(api, monkeypatch, cancelled=False)
    assert {SETTLED_AT_ONCE, 2 * SETTLED_AT_ONCE} <= set(seen)


@INSIDE
async def test_all_are_counted_if_that_is_cancelled(api: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    await settle_beside(api, monkeypatch, cancelled=True)


@pytest.mark.parametrize("lengths", [[], [0], [7], [8, 0, 20], [3, 8, 8, 1]])
async def test_prompts_come_from_a_child_in_slices(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_IDS_AT_ONCE", 8)
    ids = array("I", range(sum(lengths)))
    told = {"rest": '{"prompt": "x"}', "lengths": lengths}
    parsed = await parsers._parsed(CompletionRequest, told, ids.tobytes())
    ends = [sum(lengths[: nth + 1]) for nth in range(len(lengths))]
    assert parsed.prompts == [tuple(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
