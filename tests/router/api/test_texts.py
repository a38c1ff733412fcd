"""/tokenize, /detokenize, and routes that are refused with a hint."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from hackkv.tokenizer import Tokenizer
from router.api import texts
from router.api.answers import Detokenized, Tokenized
from router.api.app import build_app
from router.api.prompts import SMALL
from tests.router.api.test_tools import TOOLS
from tests.router.conftest import INSIDE, Api, Inside, check_error, make_served
from tests.router.scripted import Cluster

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fox"}]


@pytest.mark.parametrize("add_special_tokens", [None, False, True])
async def test_a_text_goes_to_tokens_and_back(api: Api, tokenizer: Tokenizer, add_special_tokens: bool | None) -> None:
    text = "the quick </s> é\n"
    asked = {"prompt": text, "model": "tiny", "return_token_strs": True, "add_special_tokens": add_special_tokens}
    told = Tokenized.model_validate((await api.http.post("/tokenize", json=asked)).json())
    ids = tokenizer.encode(text, add_special_tokens is not False)
    assert (told.tokens, told.count, told.max_model_len) == (ids, len(ids), 512)
    assert told.token_strs is not None
    assert (told.token_strs[0], "</s>" in told.token_strs) == (tokenizer.token_piece(ids[0]), True)
    back = Detokenized.model_validate((await api.http.post("/detokenize", json={"tokens": ids})).json())
    assert back.prompt == text
    assert (await api.http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    assert (await api.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "more", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"tools": TOOLS}]
)
async def test_a_conversation_has_the_tokens_that_chat_computes(api: Api, more: dict[str, Any]) -> None:
    counted = (await api.http.post("/tokenize", json={"messages": TURNS, **more})).json()
    asked = {"messages": TURNS, **more, "max_tokens": 1}
    answer = (await api.http.post("/v1/chat/completions", json=asked)).json()
    (job,) = api.cluster.jobs
    assert (counted["tokens"], counted["count"]) == (list(job.request.prompt_ids), answer["usage"]["prompt_tokens"])
    assert counted["token_strs"] is None


async def test_no_node_is_needed_and_more_may_be_counted_than_fits(tokenizer: Tokenizer) -> None:
    app = build_app(make_served(Cluster(), tokenizer))  # no node has joined
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        told = (await client.post("/tokenize", json={"prompt": "\u0001" * 399})).json()
        assert (told["count"], told["max_model_len"]) == (399, None)
        error = check_error(await client.post("/tokenize", json={"prompt": "\u0001" * 401}), 400)
        assert error["param"] == "prompt"


@INSIDE
@pytest.mark.parametrize(
    "body",
    [{"prompt": "fox \u00e9\u0001"}, {"messages": TURNS}, {"tokens": [97, 98, 2]}],
    ids=lambda body: str(body)[:9],
)
async def test_a_large_body_is_answered_elsewhere_and_alike(
    api: Inside, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    route = "/detokenize" if "tokens" in body else "/tokenize"
    here = (await api.http.post(route, json=body)).content

    def fail(*_: object) -> None:
        raise AssertionError("the event loop was to do this work")

    monkeypatch.setattr("router.api.prompts.answer_question", fail)
    padded = json.dumps(body) + " " * SMALL
    response = await api.http.post(route, content=padded)
    assert (response.status_code, response.content) == (200, here)
    bad = json.dumps({**body, "what": 1}) + " " * SMALL
    assert check_error(await api.http.post(route, content=bad), 400)["param"] == "what"


REFUSED = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": TURNS}, "prompt"),
    ("/tokenize", {"prompt": "x", "tools": TOOLS}, "tools"),
    ("/tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ("/tokenize", {"messages": [*TURNS, {"role": "user"}]}, "messages[2].content"),
    ("/tokenize", {"content": "x", "prompt": "x"}, "content"),
    ("/tokenize", {"prompt": "x", "add_special_token": True}, "add_special_token"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [97, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [97] * 401}, "tokens"),
]


@pytest.mark.parametrize(("route", "body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
async def test_a_bad_field_is_a_400_that_names_it(api: Api, route: str, body: dict[str, Any], param: str) -> None:
    assert check_error(await api.http.post(route, json=body), 400)["param"] == param


@INSIDE
async def test_ids_whose_text_is_out_of_proportion_are_refused(api: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_TEXT", 2)
    assert (await api.http.post("/detokenize", json={"tokens": [67, 67]})).json() == {"prompt": "aa"}
    assert "longer" in check_error(await api.http.post("/detokenize", json={"tokens": [67] * 3}), 400)["message"]


async def test_embeddings_are_refused_by_name_with_a_hint(api: Api) -> None:
    for body in (b'{"input": "x", "model": "tiny"}', b"", b"{"):
        error = check_error(await api.http.post("/v1/embeddings", content=body), 404)
        assert error["code"] == "not_supported"
        assert "/v1/embeddings is not supported" in error["message"]
    assert await api.counted('hackkv_http_refused_total{status="404"}') == 3
