"""The HTTP API over a scripted cluster: requests that are served, and requests that are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hackkv.errors import HackkvError, NodeLost, NonFiniteError, Overloaded
from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from tests.router.conftest import INSIDE, Api, Inside, check_error, make_served
from tests.router.scripted import Cluster, Point

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def say(api: Api, text: str) -> None:
    """Make the cluster answer every request with a text."""
    ids = api.tokenizer.encode(text)
    api.cluster.script.answer = lambda request: ids


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """OpenAI's usage of an answer without cached tokens."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


# What is served -------------------------------------------------------------------------------------------------------


async def test_text_comes_back_whole(api: Api) -> None:
    ids = [*api.tokenizer.encode("over the lazy dog"), 1]  # 1 is </s>, which has no text
    api.cluster.script.answer = lambda request: ids
    answer = (await api.http.post(COMPLETIONS, json={"prompt": "the quick", "max_tokens": 50})).json()
    assert answer["choices"] == [{"text": "over the lazy dog", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert answer["object"] == "text_completion"
    await api.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("lazy", "over the ", "stop"), (["zz", "he l"], "over t", "stop"), ("cat", "over the lazy dogdog", "length")],
)
async def test_stop_strings_are_found_across_tokens(
    api: Api, stop: object, text: str, reason: str, stream: bool
) -> None:
    say(api, "over the lazy dogdog")
    length = len(api.tokenizer.encode("over the lazy dogdog"))
    body = {"prompt": "x", "max_tokens": length, "stop": stop, "stream": stream}
    response = await api.http.post(COMPLETIONS, json=body)
    choices = [event["choices"][0] for event in events(response)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == reason
    await api.assert_idle()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_salt_goes_along_and_cached_tokens_are_told(api: Api, path: str) -> None:
    api.cluster.script.cached_tokens = 1
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": ["xy", "z"]}
    answer = (await api.http.post(path, json={**body, "n": 2, "max_tokens": 2, "cache_salt": "tenant"})).json()
    prompts = 1 if path == CHAT else 2
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": prompts}
    jobs = api.cluster.jobs
    assert [job.request.cache_salt for job in jobs] == ["tenant"] * 2 * prompts


async def test_stop_strings_wait_for_min_tokens(api: Api) -> None:
    say(api, "aaaaaaaa")
    count = len(api.tokenizer.encode("aaaaaaaa"))
    body = {"prompt": "x", "max_tokens": count, "stop": "a", "min_tokens": 3}
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_is_one_event_per_token_with_usage_at_the_end(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    data = events(await api.http.post(COMPLETIONS, json=body))
    assert len(data) == 5 + 2
    assert all(event["usage"] is None for event in data[:5])
    assert data[5]["choices"] == []
    assert data[5]["usage"] == usage(1, 5)
    assert data[6] == "[DONE]"


async def test_batches_and_n_are_numbered_and_counted(api: Api) -> None:
    body = {"prompt": ["a", "zw"], "n": 2, "max_tokens": 3, "seed": 5, "temperature": 0}
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == usage(3, 12)
    seeds = sorted(job.request.sampling.seed for job in api.cluster.jobs)
    assert seeds == [5, 5, 6, 6]


async def test_two_equal_prompts_count_twice(api: Api) -> None:
    answer = (await api.http.post(COMPLETIONS, json={"prompt": ["a", "a"], "max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens"] == 2


async def test_echo_with_logprobs_scores_the_prompt(api: Api) -> None:
    body = {"prompt": "xyz", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "xyz"
    assert choice["logprobs"]["tokens"] == ["x", "y", "z"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert answer["usage"] == usage(3, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_prompt_first(api: Api, stream: bool) -> None:
    say(api, "dog!")
    ids = api.tokenizer.encode("dog!")
    body = {"prompt": ids, "max_tokens": len(ids), "echo": True, "logprobs": 0, "stream": stream}
    response = await api.http.post(COMPLETIONS, json=body)
    choices = [event["choices"][0] for event in events(response)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "dog!dog!"
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert [len("".join(tokens[:index])) for index in range(len(tokens))] == offsets


async def test_every_sampling_field_reaches_the_nodes(api: Api) -> None:
    body = {
        "prompt": "x", "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -4,
        "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {"5": 10, "4": -1},
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "logprobs": 2,
    }  # fmt: skip
    assert (await api.http.post(COMPLETIONS, json=body)).status_code == 200
    sampling = api.cluster.jobs[0].request.sampling
    for name, value in {**body, "logit_bias": ((4, -1.0), (5, 10.0)), "stop_token_ids": (9,)}.items():
        if name != "prompt":
            assert getattr(sampling, name) == value


async def test_null_means_default(api: Api) -> None:
    names = ["n", "stop", "temperature", "top_p", "top_k", "seed", "stream", "logit_bias", "echo", "best_of", "suffix"]
    body = {"prompt": "x", "model": None, **dict.fromkeys(names)}
    assert (await api.http.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 16


async def test_neutral_values_of_unsupported_fields_pass(api: Api) -> None:
    body = {
        "messages": MESSAGES, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "audio": None,
        "modalities": ["text"], "store": False, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto",
        "functions": None, "parallel_tool_calls": True, "max_completion_tokens": 2,
    }  # fmt: skip
    assert (await api.http.post(CHAT, json=body)).status_code == 200
    assert (await api.http.post(COMPLETIONS, json={"prompt": "x", "best_of": 1, "suffix": ""})).status_code == 200


async def test_chat_uses_the_template_and_its_own_default_length(api: Api) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    answer = (await api.http.post(CHAT, json={"messages": messages})).json()
    assert answer["usage"]["completion_tokens"] == 24
    prompt = api.tokenizer.decode(api.cluster.jobs[0].request.prompt_ids, False)
    assert prompt == "<|turn|>system:be\nkind<|turn|>user:hi<|turn|>assistant:<|turn|>assistant:"


async def test_the_default_length_is_cut_to_the_context(api: Api) -> None:
    answer = (await api.http.post(COMPLETIONS, json={"prompt": [97] * 400})).json()
    assert answer["usage"]["completion_tokens"] == 16
    answer = (await api.http.post(CHAT, json={"messages": [{"role": "user", "content": "\u0001" * 370}]})).json()
    assert answer["usage"]["completion_tokens"] == 24


async def test_stages_come_back_and_sum_to_the_total(api: Api) -> None:
    body = {"prompt": "xyz", "max_tokens": 4, "return_stages": True}
    report = (await api.http.post(COMPLETIONS, json=body)).json()["hackkv"]
    assert sum(report["stages"].values()) == pytest.approx(report["total_s"])
    assert report["kv"] == {
        "codec": "hack", "bytes_by_plane": {"k_codes": 6, "v_codes": 9}, "header_bytes": 7, "fp16_bytes": 96,
        "ratio": pytest.approx(22 / 96), "tokens": 3,
    }  # fmt: skip
    assert (report["prefill_node"], report["decode_node"], report["attempts"]) == ("p0", "d0", 1)
    data = events(await api.http.post(CHAT, json={"messages": MESSAGES, "stream": True, "return_stages": True}))
    assert data[-2]["choices"] == []
    assert data[-2]["hackkv"]["attempts"] == 1


async def test_an_empty_prompt_is_bos(api: Api) -> None:
    prompts: list[Any] = ["", [], [[]], [""]]
    for prompt in prompts:
        assert (await api.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})).status_code == 200
    jobs = api.cluster.jobs
    assert {job.request.prompt_ids for job in jobs} == {(api.tokenizer.bos_id,)}


async def test_special_tokens_can_be_shown(api: Api) -> None:
    api.cluster.script.answer = lambda request: [2, 2, 2, 2]
    for skip, text in ((True, ""), (False, "<|turn|><|turn|>")):
        body = {"prompt": "x", "max_tokens": 2, "skip_special_tokens": skip}
        assert (await api.http.post(COMPLETIONS, json=body)).json()["choices"][0]["text"] == text


# What goes wrong ------------------------------------------------------------------------------------------------------


FAILURES = [(NodeLost("gone"), 502), (NonFiniteError("NaN in layer 3"), 500), (Overloaded("full", 7.2), 429)]


@pytest.mark.parametrize(("error", "status"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(
    api: Api, error: HackkvError, status: int, stream: bool
) -> None:
    for node_id in ("p0", "p1"):
        api.cluster.fail(node_id, Point.PREFILL, error)
    response = await api.http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert str(error) in check_error(response, status)["message"]
    if status == 429:
        assert response.headers["retry-after"] == "8"
    await api.assert_idle()


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error_event(api: Api) -> None:
    for node_id in ("d0", "d1"):
        api.cluster.fail(node_id, Point.TOKEN, NodeLost("gone"))
    data = events(await api.http.post(COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 9}))
    assert [len(event.get("choices", [])) for event in data] == [1, 1, 0]
    assert data[-1]["error"]["code"] == "node_lost"
    await api.assert_idle()


async def test_a_retry_is_invisible_but_in_the_report(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 6, "seed": 1, "return_stages": True}
    calm = (await api.http.post(COMPLETIONS, json=body)).json()
    once: list[HackkvError] = [NodeLost("gone")]
    api.cluster.script.faults |= {("d0", Point.TOKEN): once, ("d1", Point.TOKEN): once}
    shaken = (await api.http.post(COMPLETIONS, json=body)).json()
    assert shaken["choices"] == calm["choices"]
    assert (calm["hackkv"]["attempts"], shaken["hackkv"]["attempts"]) == (1, 2)


@INSIDE
async def test_readiness_names_what_is_missing(api: Inside) -> None:
    assert (await api.http.get("/ready")).json()["status"] == "ready"
    api.cluster.now = 10.0
    api.cluster.fleet.nodes.expire()
    for path in ("/ready", "/health"):
        response = await api.http.get(path)
        assert response.status_code == 503
        assert response.json()["missing"] == ["prefill", "decode"]
        assert (await api.http.head(path)).status_code == 503  # as `wget --spider` asks
    for method in ("GET", "HEAD"):
        assert (await api.http.request(method, "/live")).status_code == 200


async def test_the_schema_names_the_api_and_not_the_page(api: Api) -> None:
    paths = (await api.http.get("/openapi.json")).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= paths.keys()
    assert "/" not in paths


async def test_a_fleet_that_never_was_is_a_503_and_one_that_restarts_is_waited_for(tokenizer: Tokenizer) -> None:
    nobody = Cluster()
    app = build_app(make_served(nobody, tokenizer))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        check_error(response, 503)
        assert response.headers["retry-after"] == "1"
        await nobody.join()
        nobody.now = 10.0
        nobody.fleet.nodes.expire()
        waiting = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x"}))
        while not nobody.fleet.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await nobody.join()
        assert (await waiting).status_code == 200
