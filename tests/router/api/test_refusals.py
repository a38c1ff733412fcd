"""The HTTP API refuses every bad field, body, route, key and size by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.router.conftest import INSIDE, Api, Inside, check_error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

CLOCK = {"type": "function", "function": {"name": "clock"}}
CHOICE = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOICE]}}


def called(arguments: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "clock", "arguments": arguments}}]}


REFUSED = [
    ({"prompt": "x", "max_tokenz": 3}, "max_tokenz"),
    ({"max_tokens": 3}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"prompt": [True]}, "prompt[0]"),
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
    ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"prompt": "x", "logit_bias": {" 1": 1}}, "logit_bias. 1"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"prompt": "x", "logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"prompt": "x", "logit_bias": {"1": True}}, "logit_bias.1"),
    ({"prompt": "x", "stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": MESSAGES, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt": "x", "logprobs": 99}, "logprobs"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
    ({"prompt": "x", "seed": 1 << 63}, "seed"),
    ({"prompt": "x", "cache_salt": 7}, "cache_salt"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": [97] * 401}, "prompt"),
    ({"prompt": [97] * 401, "max_tokens": 512}, "prompt"),
    ({"prompt": "x", "max_tokens": 512}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [*MESSAGES, {"role": "user", "content": 7}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "hi", "<text>": 1}]}, "messages[0].<text>"),
    ({"messages": MESSAGES, "<parts>": 1}, "<parts>"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\u0001" * 401}]}, "messages"),
    ({"messages": MESSAGES, "max_tokens": 512}, "max_tokens"),
    ({"messages": MESSAGES, "max_completion_tokens": 512}, "max_completion_tokens"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": MESSAGES, "tools": [CLOCK, CLOCK]}, "tools"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [CLOCK], "tool_choice": CHOICE}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [CLOCK], "tool_choice": ALLOWED}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [CLOCK], "guided_regex": "a"}, "guided_regex"),
    ({"messages": MESSAGES, "tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"messages": [*MESSAGES, called("{]")]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*MESSAGES, called('{"zone": 1} x')]}, "messages[1].tool_calls[0].function.arguments"),
    (
        {"messages": [*MESSAGES, called('{"zone": ' + "9" * 5000 + ", ")]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [*MESSAGES, called("[")]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*MESSAGES, called("[]")]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    ({"messages": [{**called("{}"), "role": "user", "content": "x"}]}, "messages[0].tool_calls"),
    ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": MESSAGES, "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"prompt": "x", "guided_choice": []}, "guided_choice"),
    ({"prompt": "x", "guided_regex": ""}, "guided_regex"),
    ({"prompt": "x", "structured_outputs": {"what": 1}}, "structured_outputs.what"),
    ({"messages": MESSAGES, "functions": [{}]}, "functions"),
    ({"messages": MESSAGES, "audio": {}}, "audio"),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
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
    assert error["param"] == param, error
    await api.assert_idle()


async def test_refusals_are_counted_by_status_and_are_no_sequences(api: Api) -> None:
    for body, path in (
        ({"prompt": 7}, COMPLETIONS),
        ({"messages": []}, CHAT),
        ({"prompt": "x", "model": "y"}, COMPLETIONS),
    ):
        await api.http.post(path, json=body)
    assert await api.counted('hackkv_http_refused_total{status="400"}') == 2
    assert await api.counted('hackkv_http_refused_total{status="404"}') == 1
    assert await api.counted('hackkv_requests_total{outcome="refused"}') == 0


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


@INSIDE  # over a socket this client sends a whole body before it reads
@pytest.mark.parametrize("settings", [{"deadlines": {"body_s": 0.01}}])
async def test_a_body_that_never_ends_is_a_408(api: Inside) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    check_error(await api.http.post(COMPLETIONS, content=parts()), 408)


@pytest.mark.parametrize("settings", [{"api_keys": ["secret", "other"]}])
async def test_the_key_guards_everything_but_the_probes(api: Api) -> None:
    for path in ("/live", "/ready", "/health"):
        assert (await api.http.get(path)).status_code == 200
    for path in ("/metrics", "/version", "/v1/models", "/openapi.json", "/nothing"):
        for key in ("", "Bearer wrong", "secret", "Bearer", "Basic secret", "Bearer sécret"):
            response = await api.http.get(path, headers=[(b"authorization", key.encode())])
            assert response.headers["www-authenticate"] == "Bearer"
            check_error(response, 401)
    for key in ("Bearer secret", "Bearer other", "bearer secret"):
        assert (await api.http.get("/v1/models", headers={"authorization": key})).status_code == 200
    assert await api.counted('hackkv_http_refused_total{status="401"}') == 30


MEDIA_TYPES = {
    "application/json": 200, "application/json; charset=utf-8": 200, "application/merge-patch+json": 200, "": 200,
    "text/plain": 415, "application/x-www-form-urlencoded": 415, "multipart/form-data": 415, "text/json": 415,
}  # fmt: skip


@pytest.mark.parametrize("given", MEDIA_TYPES)
async def test_only_json_is_taken(api: Api, given: str) -> None:
    headers = {"content-type": given} if given else {}
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    response = await api.http.post(COMPLETIONS, content=body, headers=headers)
    assert response.status_code == MEDIA_TYPES[given]
    if not given:  # a page may send such a body to any host without asking
        response = await api.http.post(COMPLETIONS, content=body, headers={"origin": "https://elsewhere.example"})
        assert check_error(response, 415)["code"] == "unsupported_media_type"


GOOD_IDS = ("a", "trace-0.1_2:3/4+5=@", "x" * 128)
BAD_IDS = ("", "x" * 129, "a b", "é", "a\tb")


async def test_a_request_has_an_id_in_headers_bodies_and_jobs(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for name in GOOD_IDS:
        response = await api.http.post(COMPLETIONS, json=body, headers={"x-request-id": name})
        assert response.headers["x-request-id"] == name
        assert response.json()["id"] == f"cmpl-{name}"
    ids = [job.request.request_id for job in api.cluster.jobs]
    assert sorted(ids) == sorted(f"cmpl-{name}-0" for name in GOOD_IDS)
    made = set()
    for name in BAD_IDS:
        response = await api.http.get("/nothing", headers=[(b"x-request-id", name.encode())])
        made.add(response.headers["x-request-id"])
    assert len(made) == len(BAD_IDS)
    assert made.isdisjoint(BAD_IDS)


SENT_BY_BROWSERS = (
    "anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,openai-organization,"
    "openai-project,traceparent,x-api-key,x-request-id,x-stainless-arch,x-stainless-retry-count"
)
"""Headers of the official clients' requests, for which a browser asks permission."""


def exposed(answer: httpx.Response) -> set[str]:
    """Headers that a page of another host may read."""
    return set(answer.headers["access-control-expose-headers"].split(", "))


ORIGINS = [([], None), (["https://app.example"], "https://app.example"), (["https://b"], None)]


@pytest.mark.parametrize(
    ("settings", "allowed"), [({"api_keys": ["secret"], "cors_origins": named}, allowed) for named, allowed in ORIGINS]
)
async def test_pages_of_other_hosts_are_let_in_only_if_they_are_named(api: Api, allowed: str | None) -> None:
    asks = {
        "origin": "https://app.example", "access-control-request-method": "POST",
        "access-control-request-headers": SENT_BY_BROWSERS,
    }  # fmt: skip
    asked = await api.http.options(COMPLETIONS, headers=asks)
    assert asked.headers.get("access-control-allow-origin") == allowed
    if allowed is not None:
        assert asked.status_code == 200
        assert set(SENT_BY_BROWSERS.split(",")) <= set(asked.headers["access-control-allow-headers"].split(","))
    refused = await api.http.post(COMPLETIONS, json={}, headers={"origin": "https://app.example"})
    check_error(refused, 401)
    assert refused.headers.get("access-control-allow-origin") == allowed
    if allowed is not None:  # the headers that official clients read
        assert {"x-request-id", "request-id", "retry-after"} <= exposed(refused)


async def test_errors_do_not_repeat_long_texts(api: Api) -> None:
    for body in ({"prompt": "x", "model": "m" * 3000}, {"prompt": "x", "n" * 3000: 1}):
        response = await api.http.post(COMPLETIONS, json=body)
        assert response.status_code in (400, 404)
        assert len(response.json()["error"]["message"]) < 2100


async def test_deep_json_is_told_so(api: Api) -> None:
    deep = b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    response = await api.http.post(COMPLETIONS, content=deep)
    assert "nested too deeply" in check_error(response, 400)["message"]
