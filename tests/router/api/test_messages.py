"""/v1/messages: Anthropic's client with its conversations, tools, events and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from hackkv.errors import NodeLost
from router.api.messages.answers import AnthropicError, Counted, MessageEvent, MessageObject
from router.api.prompts import SMALL
from tests.router.api.test_tools import CALL, NATIVE, THINKS
from tests.router.conftest import LIMITS, TEMPLATE, Api
from tests.router.scripted import Cluster, Point
from tests.router.speaking import longest_shown, named_events, shown, speaking_http

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
USER: Any = {"role": "user", "content": "hi"}


@asynccontextmanager
async def speaking(
    checkpoint: Path, folder: Path, cluster: Cluster, answer: str, template: str = TEMPLATE
) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client of a model that says `answer` to everything."""
    async with speaking_http(checkpoint, folder, cluster, answer, template) as http:
        yield AsyncAnthropic(api_key="none", base_url="http://router", http_client=http, max_retries=0)


def check_anthropic(response: httpx.Response, status: int) -> str:
    """The message of an error in Anthropic's shape."""
    assert response.status_code == status, response.text
    told = AnthropicError.model_validate(response.json())
    assert told.request_id == response.headers["request-id"] == response.headers["x-request-id"]
    return told.error.message


ANSWERS = [
    (TEMPLATE, "hello", ["text"], "end_turn"),
    (TEMPLATE, "Let me see. " + CALL, ["text", "tool_use"], "tool_use"),
    (NATIVE, CALL + "\n" + CALL, ["tool_use", "tool_use"], "tool_use"),
    (THINKS, "<think>well</think>\n\nyes", ["thinking", "text"], "end_turn"),
    (THINKS, "<think>well</think>" + CALL, ["thinking", "tool_use"], "tool_use"),
    (TEMPLATE, "hello STOP there", ["text"], "stop_sequence"),
    (TEMPLATE, "", [], "end_turn"),
]


@pytest.mark.parametrize(("template", "answer", "kinds", "reason"), ANSWERS)
async def test_an_answer_is_the_same_whole_and_built_from_events(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, template: str, answer: str, kinds: list[str], reason: str
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, answer, template) as client:
        asked: Any = {"model": "tiny", "messages": [USER], "tools": [CLOCK], "max_tokens": 200, "system": "Be."}
        asked["stop_sequences"] = ["STOP", "\u0001"]
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    assert ([block.type for block in whole.content], whole.stop_reason) == (kinds, reason)
    assert whole.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    told = [[{**block.to_dict(), "id": None} for block in message.content] for message in (whole, streamed)]
    assert told[0] == [{name: value for name, value in block.items() if name != "parsed_output"} for block in told[1]]
    for block in whole.content:
        if block.type == "tool_use":
            assert (block.name, block.input) == ("clock", {"zone": "é"})
    assert "system:Be." in shown(cluster, tmp_path / "checkpoint")


async def test_blocks_of_an_answer_come_back_as_they_are(checkpoint: Path, tmp_path: Path, cluster: Cluster) -> None:
    template = NATIVE + "{# </think> #}"
    async with speaking(checkpoint, tmp_path, cluster, "<think>hm</think>So. " + CALL, template) as client:
        history: list[Any] = [USER]
        asked: Any = {"model": "tiny", "tools": [CLOCK], "max_tokens": 100}
        for dump in (True, False):
            answer = await client.messages.create(messages=history, **asked)
            call = next(block for block in answer.content if block.type == "tool_use")
            blocks = [block.model_dump() for block in answer.content] if dump else answer.content
            history.append({"role": "assistant", "content": blocks})
            content: Any = [{"type": "text", "text": "noon"}] if dump else "noon"
            result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": False}
            history.append({"role": "user", "content": [result, {"type": "text", "text": "More."}]})
        await client.messages.create(messages=history, **asked)
        counted = await client.messages.count_tokens(model="tiny", messages=history, tools=[CLOCK])
    text = longest_shown(cluster, tmp_path / "checkpoint")
    assert f"assistant:So.[{call.id} é]<|turn|>tool:noon{call.id}<|turn|>user:More.<|turn|>assistant:" in text
    assert (text.count("<|turn|>tool:noon"), "hm" in text) == (2, False)
    jobs = cluster.jobs
    assert counted.input_tokens == max(len(job.request.prompt_ids) for job in jobs)


async def test_turns_of_one_role_are_one_and_an_assistants_last_is_continued(api: Api) -> None:
    turns = [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "ye"},
    ]
    system = [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Do."}]
    asked = {"messages": turns, "system": system, "max_tokens": 1}
    assert (await api.http.post(MESSAGES, json=asked)).status_code == 200
    prompt = api.tokenizer.decode(api.cluster.jobs[0].request.prompt_ids, False)
    assert prompt == "<|turn|>system:Be.\nDo.<|turn|>user:hi\nyou<|turn|>assistant:ye"


@pytest.mark.parametrize("more", [{}, {"return_stages": True, "thinking": {"type": "adaptive"}}, {"top_k": 3}])
async def test_answers_and_events_have_the_described_fields_and_no_other(api: Api, more: dict[str, Any]) -> None:
    api.cluster.script.cached_tokens = 1
    asked = {"messages": [USER], "max_tokens": 4, "tools": [CLOCK], "seed": 3, **more}
    response = await api.http.post(MESSAGES, json=asked)
    whole = response.json()
    MessageObject.model_validate(whole)
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 4)
    assert whole["id"] == f"msg_{response.headers['request-id']}"
    count = Counted.model_validate((await api.http.post(COUNT, json={"messages": [USER], "tools": [CLOCK]})).json())
    usage = whole["usage"]
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (1, count.input_tokens - 1)
    seen = named_events(await api.http.post(MESSAGES, json={**asked, "stream": True}))
    for event in seen:
        MessageEvent.model_validate(event)
    assert [event["type"] for event in seen[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in seen[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in seen if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert (seen[-2]["usage"], "hackkv" in seen[-2]) == (usage, "return_stages" in more)


CHOICES = [
    ({"type": "any"}, True), ({"type": "tool", "name": "clock"}, True), ({"type": "auto"}, False),
    ({"type": "none"}, False), ({"type": "any", "disable_parallel_tool_use": True}, True),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "forced"), CHOICES)
async def test_a_tool_that_has_to_be_called_binds_the_answer(api: Api, choice: dict[str, Any], forced: bool) -> None:
    asked = {"messages": [USER], "max_tokens": 2, "tools": [CLOCK], "tool_choice": choice}
    response = await api.http.post(MESSAGES, json=asked)
    assert response.status_code == 200, response.text
    (job,) = api.cluster.jobs
    assert bool(job.request.sampling.grammar) == forced
    offered = "You may call" in api.tokenizer.decode(job.request.prompt_ids)
    assert offered == (choice["type"] != "none")


async def test_a_call_that_is_cut_short_is_told_as_far_as_it_came(
    checkpoint: Path, tmp_path: Path, cluster: Cluster
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, CALL) as client:
        for length in range(20, len(CALL)):
            answer = await client.messages.create(model="tiny", messages=[USER], tools=[CLOCK], max_tokens=length)
            for block in answer.content:
                assert answer.stop_reason in ("max_tokens", "tool_use")
                if block.type == "tool_use":
                    assert str(block.input.get("zone", "")) in ("", "\ufffd", "é")


async def test_large_bodies_are_read_elsewhere_and_answered_alike(api: Api) -> None:
    asked = {"messages": [USER], "system": "Be.", "tools": [CLOCK]}
    padding = {"thinking": "x" * SMALL}
    counts = [(await api.http.post(COUNT, json={**asked, **more})).json() for more in ({}, padding)]
    assert counts[0] == counts[1]
    for more in ({}, padding):
        assert (await api.http.post(MESSAGES, json={**asked, **more, "max_tokens": 2, "seed": 1})).status_code == 200
    told = await api.http.post(MESSAGES, json={"messages": [{**USER, "content": "\u0001" * 5000}], "max_tokens": 1})
    assert "messages has" in check_anthropic(told, 400)
    jobs = [job.request for job in api.cluster.jobs]
    assert jobs[0].prompt_ids == jobs[1].prompt_ids


async def test_a_stream_that_breaks_off_says_so(api: Api) -> None:
    for node in ("d0", "d1"):
        api.cluster.script.faults[node, Point.TOKEN] = [NodeLost("gone")] * 4
    seen = named_events(await api.http.post(MESSAGES, json={"messages": [USER], "max_tokens": 9, "stream": True}))
    assert seen[-1] == {"type": "error", "error": {"type": "api_error", "message": seen[-1]["error"]["message"]}}
    MessageEvent.model_validate(seen[-1])
    await api.assert_idle()


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """A body whose one message has blocks."""
    return {"messages": [{"role": role, "content": list(blocks)}]}


CALLED = {"type": "tool_use", "id": "1", "name": "clock", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [USER], "max_tokens": None}, "max_tokens"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_tokens": 512}, "max_tokens is 512 and messages has"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "the chat template refused"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (turn({"type": "image", "source": {}}), "messages[0].content[0].type: this model takes text only"),
    (turn({"type": "text"}), "messages[0].content[0].text"),
    (turn(), "messages holds nothing"),
    (turn({"type": "thinking", "thinking": "x"}, role="assistant"), "messages holds nothing"),
    (turn(CALLED), "messages[0].content[0]: tool_use belongs"),
    (turn(CALLED, role="assistant"), "messages: ends with calls"),
    (turn({"type": "tool_result", "tool_use_id": "1"}, role="assistant"), "messages[0].content[0]: tool_result"),
    (turn({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    ({"messages": [USER], "stop_sequences": [""]}, "stop_sequences[0]"),
    ({"messages": [USER], "system": 3}, "system"),
    ({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"messages": [USER], "tools": [CLOCK, CLOCK]}, "tools: two functions"),
    ({"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [USER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"messages": [USER], "tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name"),
    ({"messages": [USER], "output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"messages": [USER], "container": "x"}, "container"),
    ({"messages": [USER], "mcp_servers": [{}]}, "mcp_servers"),
    ({"messages": [USER], "max_tokenz": 1}, "unknown field: max_tokenz"),
]


@pytest.mark.parametrize(("body", "fault"), REFUSED, ids=lambda value: json.dumps(value)[:60])
async def test_a_bad_field_is_a_400_that_names_it(api: Api, body: dict[str, Any], fault: str) -> None:
    message = check_anthropic(await api.http.post(MESSAGES, json={"max_tokens": 3, **body}), 400)
    assert fault in message
    await api.assert_idle()


@pytest.mark.parametrize(
    "settings",
    [{"deadlines": {"prefill_s": 0.01}, "api_keys": ["secret"], "limits": {**LIMITS, "max_body_bytes": 1000}}],
)
async def test_every_error_below_the_route_has_anthropics_shape(api: Api) -> None:
    api.cluster.gate(Point.PREFILL)
    body = {"messages": [USER], "max_tokens": 3}
    check_anthropic(await api.http.post(MESSAGES, json=body), 401)
    check_anthropic(await api.http.post(MESSAGES, json=body, headers={"x-api-key": "wrong"}), 401)
    key = {"x-api-key": "secret"}
    for path, status in ((MESSAGES, 405), ("/v1/messages/batches", 404)):
        check_anthropic(await api.http.get(path, headers=key), status)
    check_anthropic(await api.http.post(MESSAGES, json={**body, "model": "other"}, headers=key), 404)
    check_anthropic(await api.http.post(MESSAGES, content=b"x" * 1001, headers=key), 413)
    check_anthropic(await api.http.post(COUNT, content=b"{", headers=key), 400)
    check_anthropic(await api.http.post(MESSAGES, content=b"{}", headers={**key, "content-type": "text/plain"}), 415)
    check_anthropic(await api.http.post(MESSAGES, json=body, headers=key), 504)
    url = str(api.http.base_url)
    client = AsyncAnthropic(api_key="wrong", base_url=url, http_client=api.http2, max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client.messages.create(model="tiny", messages=[USER], max_tokens=3)
    assert refused.value.request_id
