"""/v1/responses: the official client's conversations, tools and events, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseInputItem
from pydantic import TypeAdapter

from hackkv.errors import NodeLost
from router.api.prompts import SMALL
from router.api.responses.answers import ResponseEvent, ResponseObject
from tests.router.api.test_tools import CALL, NATIVE, THINKS
from tests.router.conftest import TEMPLATE, Api, check_error
from tests.router.scripted import Cluster, Point
from tests.router.speaking import longest_shown, named_events, shown, speaking_http

RESPONSES = "/v1/responses"
CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": True}
USER: Any = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@asynccontextmanager
async def speaking(
    checkpoint: Path, folder: Path, cluster: Cluster, answer: str, template: str = TEMPLATE
) -> AsyncIterator[AsyncOpenAI]:
    """The official client of a model that says `answer` to everything."""
    async with speaking_http(checkpoint, folder, cluster, answer, template) as http:
        yield AsyncOpenAI(api_key="none", base_url="http://router/v1", http_client=http, max_retries=0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, which are numbered."""
    found = named_events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def bare(told: Any) -> Any:
    """`told` without the fields that differ between answers or that the client adds."""
    if isinstance(told, dict):
        names = ("id", "created_at", "completed_at", "call_id", "item_id", "parsed", "parsed_arguments")
        return {name: bare(value) for name, value in told.items() if name not in names}
    return [bare(value) for value in told] if isinstance(told, list) else told


ANSWERS = [
    (TEMPLATE, "hello", ["message"]),
    (TEMPLATE, "Let me see. " + CALL, ["message", "function_call"]),
    (NATIVE, CALL + "\n" + CALL, ["function_call", "function_call"]),
    (THINKS, "<think>well</think>\n\nyes", ["reasoning", "message"]),
    (THINKS, "<think>well</think>" + CALL, ["reasoning", "function_call"]),
    (TEMPLATE, "", []),
]


@pytest.mark.parametrize(("template", "answer", "kinds"), ANSWERS)
async def test_an_answer_is_the_same_whole_and_built_from_events(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, template: str, answer: str, kinds: list[str]
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, answer, template) as client:
        asked: Any = {"model": "tiny", "input": "hi", "tools": [CLOCK], "max_output_tokens": 200, "instructions": "Be."}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            seen = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert [item.type for item in whole.output] == kinds
    assert (whole.status, whole.usage and whole.usage.input_tokens_details.cached_tokens) == ("completed", 0)
    assert shown(cluster, tmp_path / "checkpoint").count("Be.") == 1
    assert bare(streamed.to_dict())["output"] == bare(whole.to_dict())["output"]
    for item in whole.output:
        if item.type == "function_call":
            assert (item.name, json.loads(item.arguments)) == ("clock", {"zone": "é"})
    assert [event.type for event in seen][:2] == ["response.created", "response.in_progress"]
    assert seen[-1].type == "response.completed"


async def test_items_of_an_answer_come_back_as_the_client_dumps_them(
    checkpoint: Path, tmp_path: Path, cluster: Cluster
) -> None:
    template = NATIVE + "{# </think> #}"
    async with speaking(checkpoint, tmp_path, cluster, "<think>hm</think>So. " + CALL, template) as client:
        history: list[Any] = [USER]
        asked: Any = {"model": "tiny", "tools": [CLOCK], "max_output_tokens": 100}
        for dump in (True, False):
            answer = await client.responses.create(input=history, **asked)
            call = next(item for item in answer.output if item.type == "function_call")
            history += [item.model_dump() if dump else item.to_dict() for item in answer.output]
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
        TypeAdapter(list[ResponseInputItem]).validate_python(history)
        await client.responses.create(input=history, **asked)
    text = longest_shown(cluster, tmp_path / "checkpoint")
    turn = f"assistant:So.[{call.call_id} é]<|turn|>tool:noon{call.call_id}"
    assert turn in text
    assert text.count("<|turn|>tool:noon") == 2
    assert "hm" not in text


@pytest.mark.parametrize("more", [{}, {"return_stages": True, "top_logprobs": 2}, {"instructions": "Be."}])
async def test_answers_and_events_have_the_described_fields_and_no_other(api: Api, more: dict[str, Any]) -> None:
    asked = {"input": [USER], "max_output_tokens": 4, "tools": [CLOCK], "seed": 3, **more}
    whole = (await api.http.post(RESPONSES, json=asked)).json()
    ResponseObject.model_validate(whole)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["usage"]["output_tokens"], whole["output"][-1]["status"]) == (4, "incomplete")
    assert ("hackkv" in whole) == ("return_stages" in more)
    seen = events(await api.http.post(RESPONSES, json={**asked, "stream": True}))
    for event in seen:
        ResponseEvent.model_validate(event)
    last = bare(seen[-1]["response"])
    assert {**last, "hackkv": None} == {**bare(whole), "hackkv": None}
    deltas = [event for event in seen if event["type"] == "response.output_text.delta"]
    (part,) = whole["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == (4 if "top_logprobs" in more else 0)


async def test_the_answer_has_the_form_that_was_asked_for(api: Api) -> None:
    asked = {"input": "x", "max_output_tokens": 9, "text": {"format": {"type": "json_schema", "name": "a"}}}
    asked["text"]["format"]["schema"] = SCHEMA  # type: ignore[index]
    answer = await api.http.post(RESPONSES, json=asked)
    assert answer.status_code == 200, answer.text
    (job,) = api.cluster.jobs
    assert job.request.sampling.grammar
    assert answer.json()["text"]["format"] == {"type": "json_schema", "name": "a", "schema": SCHEMA}


async def test_a_large_body_is_read_elsewhere_and_answered_alike(api: Api) -> None:
    asked = {"input": [USER], "instructions": "Be.", "tools": [CLOCK], "seed": 1, "max_output_tokens": 2}
    small = (await api.http.post(RESPONSES, json=asked)).json()
    large = (await api.http.post(RESPONSES, json={**asked, "user": "x" * SMALL})).json()
    told = await api.http.post(RESPONSES, json={"input": "\u0001" * 5000})
    assert bare(small) == bare(large)
    assert small["instructions"] == "Be."
    assert check_error(told, 400)["param"] == "input"
    prompts = {job.request.prompt_ids for job in api.cluster.jobs}
    assert len(prompts) == 1


async def test_a_stream_that_breaks_off_says_so(api: Api) -> None:
    for node in ("d0", "d1"):
        api.cluster.script.faults[node, Point.TOKEN] = [NodeLost("gone")] * 4
    seen = events(await api.http.post(RESPONSES, json={"input": "x", "max_output_tokens": 9, "stream": True}))
    assert seen[-1]["type"] == "response.failed"
    ResponseEvent.model_validate(seen[-1])
    failed = seen[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["usage"]) == ("failed", "server_error", None)
    assert failed["output"][0]["status"] == "incomplete"
    await api.assert_idle()


def item(kind: str, **fields: Any) -> dict[str, Any]:
    """A body whose input is a question and then an item."""
    return {"input": [USER, {"type": kind, **fields}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": "\u0001" * 401}, "input"),
    ({"input": "x", "max_output_tokens": 512}, "max_output_tokens"),
    ({"input": [{"role": "user", "content": "refuse"}]}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    (item("item_reference", id="msg_1"), "input[1].type"),
    (item("web_search_call", id="1"), "input[1].type"),
    (item("function_call", call_id="1", name="f", arguments="["), "input[1].arguments"),
    (item("function_call", call_id="1", name="f", arguments="[]"), "input[1].arguments"),
    (item("function_call", call_id="1", arguments="{}"), "input[1].name"),
    (item("function_call_output", call_id="1"), "input[1].output"),
    (item("function_call_output", call_id="1", output="x", what=1), "input[1].what"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
    ({"input": "x", "include": "x"}, "include"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [CLOCK, CLOCK]}, "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": "must"}, "tool_choice"),
    ({"input": "x", "tool_choice": 1}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "other"}, "tools": [CLOCK]}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"input": "x", "text": {"format": {"type": "json_object"}}, "tools": [CLOCK]}, "text.format"),
    ({"input": "x", "max_tokens": 3}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
async def test_a_bad_field_is_a_400_that_names_it(api: Api, body: dict[str, Any], param: str) -> None:
    error = check_error(await api.http.post(RESPONSES, json=body), 400)
    assert error["param"] == param, error
    assert param.partition("[")[0].partition(".")[0] in error["message"] or "template" in error["message"]
    await api.assert_idle()


@pytest.mark.parametrize(("settings", "status"), [({}, 200), ({"strict": True}, 400)])
async def test_an_encrypted_thought_is_a_hint_that_strict_routers_refuse(api: Api, status: int) -> None:
    asked = {"input": "x", "include": ["reasoning.encrypted_content"], "max_output_tokens": 1}
    assert (await api.http.post(RESPONSES, json=asked)).status_code == status


async def test_counts_are_told_in_the_clients_words(api: Api) -> None:
    error = check_error(await api.http.post(RESPONSES, json={"input": "x", "max_output_tokens": 505}), 400)
    assert error["message"].startswith("max_output_tokens is 505 and input has ")


async def test_answers_of_before_are_not_there(api: Api) -> None:
    for method, path in (
        ("GET", "/resp_1"),
        ("DELETE", "/resp_1"),
        ("POST", "/resp_1/cancel"),
        ("GET", "/r/input_items"),
    ):
        error = check_error(await api.http.request(method, RESPONSES + path), 404)
        assert "answers are not kept" in error["message"]
