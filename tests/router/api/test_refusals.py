"""What the HTTP API does not do: every bad field, body, route, key and size, refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from tests.router.conftest import Api, check_error, make_served
from tests.router.scripted import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

REFUSED = [
    ({"prompt": "x", "max_tokenz": 3}, "max_tokenz"),
    ({"max_tokens": 3}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": 3}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": ["x"] * 20, "n": 2}, "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": MESSAGES, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt": "x", "logprobs": 99}, "logprobs"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
    ({"prompt": "x", "seed": 1 << 63}, "seed"),
    ({"prompt": "x", "store": True}, "store"),
    ({"prompt": "x", "cache_salt": 7}, "cache_salt"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": [97] * 401}, "prompt"),
    ({"prompt": [97] * 401, "max_tokens": 512}, "prompt"),
    ({"prompt": "x", "max_tokens": 512}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\u0001" * 401}]}, "messages"),
    ({"messages": MESSAGES, "max_tokens": 512}, "max_tokens"),
    ({"messages": MESSAGES, "max_completion_tokens": 512}, "max_completion_tokens"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": MESSAGES, "functions": [{}]}, "functions"),
    ({"messages": MESSAGES, "audio": {}}, "audio"),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
    ({"messages": MESSAGES, "prediction": {}}, "prediction"),
    ({"messages": MESSAGES, "web_search_options": {}}, "web_search_options"),
    ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
async def test_a_bad_field_is_a_400_that_names_it(api: Api, body: dict[str, Any], param: str) -> None:
    error = check_error(await api.http.post(CHAT if "messages" in body else COMPLETIONS, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error
    api.cluster.assert_idle()


async def test_refusals_are_counted_by_status_and_are_no_sequences(api: Api) -> None:
    for body, path in (
        ({"prompt": 7}, COMPLETIONS),
        ({"messages": []}, CHAT),
        ({"prompt": "x", "model": "y"}, COMPLETIONS),
    ):
        await api.http.post(path, json=body)
    page = (await api.http.get("/metrics")).text
    for line in (
        'hackkv_http_refused_total{status="400"} 2.0',
        'hackkv_http_refused_total{status="404"} 1.0',
        'hackkv_requests_total{outcome="refused"} 0.0',
    ):
        assert line in page


async def test_too_many_tokens_are_told_the_counts(api: Api) -> None:
    error = check_error(await api.http.post(COMPLETIONS, json={"prompt": [97] * 390, "max_tokens": 200}), 400)
    assert error["message"] == (
        "max_tokens is 200 and prompt has 390 tokens: 590 together, but this model serves at most 512, "
        "which leaves 122 to generate"
    )


NOT_OBJECTS = [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"a":NaN}']


@pytest.mark.parametrize("body", NOT_OBJECTS)
async def test_what_is_not_a_json_object_is_a_400(api: Api, body: bytes) -> None:
    error = check_error(await api.http.post(COMPLETIONS, content=body), 400)
    assert error["message"].startswith("the body ") or error["param"] == "prompt"


async def test_routes_methods_and_models_that_do_not_exist(api: Api) -> None:
    assert check_error(await api.http.get("/v2/nothing"), 404)["code"] == "not_found"
    assert check_error(await api.http.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
    error = check_error(await api.http.post(COMPLETIONS, json={"prompt": "x", "model": "gpt-5"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    check_error(await api.http.get("/v1/models/gpt-5"), 404)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_cap_is_a_413_also_when_chunked(api: Api, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 8192

    content = parts() if chunked else b" " * 9 * 8192
    check_error(await api.http.post(COMPLETIONS, content=content), 413)


async def test_a_body_that_never_ends_is_a_408(cluster: Cluster, tokenizer: Tokenizer) -> None:
    app = build_app(make_served(cluster, tokenizer), body_s=0.01)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        check_error(await client.post(COMPLETIONS, content=parts()), 408)


async def test_the_key_guards_everything_but_the_probes(cluster: Cluster, tokenizer: Tokenizer) -> None:
    app = build_app(make_served(cluster, tokenizer), api_keys=("secret", "other"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(path)).status_code == 200
        for path in ("/metrics", "/version", "/v1/models", "/openapi.json", "/nothing"):
            for key in ("", "Bearer wrong", "secret", "Bearer", "Basic secret", "Bearer sécret"):
                response = await client.get(path, headers=[(b"authorization", key.encode())])
                assert response.headers["www-authenticate"] == "Bearer"
                check_error(response, 401)
        for key in ("Bearer secret", "Bearer other", "bearer secret"):
            assert (await client.get("/v1/models", headers={"authorization": key})).status_code == 200
        page = (await client.get("/metrics", headers={"authorization": "Bearer secret"})).text
        assert 'hackkv_http_refused_total{status="401"} 30.0' in page
