"""Structured output through HTTP, router, both nodes and a real model: every answer that ends validates."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from datetime import date, time
from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest

from decode_node.service import DecodeService
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.worker import Worker, load_worker
from hackkv.packaged import SHIPPED
from tests.e2e.in_process import in_process_cluster
from tests.router.processes import ROUTERS, WORKERS
from tests.schemas import FORMATS, REAL, random_schema

CONCURRENCY = 8
CHECKER = jsonschema.FormatChecker(["uuid", "ipv4", "email"])
"""Checks the keyword `format`, which validators ignore by default."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "traffic")
]
MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]


@CHECKER.checks("date", raises=ValueError)
def _is_date(text: object) -> bool:
    """Whether a text is a date of RFC 3339, section 5.6. Python has no year 0, whose calendar is that of 2000."""
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", str(text)) and date.fromisoformat(re.sub("^0000", "2000", str(text))))


@CHECKER.checks("time", raises=ValueError)
def _is_time(text: object) -> bool:
    """Whether a text is a time of RFC 3339, section 5.6. Python has no leap seconds."""
    form = re.fullmatch(r"(\d\d:\d\d):(\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", str(text).upper())
    return form is not None and time.fromisoformat(f"{form[1]}:{form[2].replace('60', '59')}{form[3]}") is not None


@CHECKER.checks("date-time", raises=ValueError)
def _is_date_time(text: object) -> bool:
    day, _, clock = str(text).upper().partition("T")
    return _is_date(day) and _is_time(clock)


@pytest.mark.parametrize(
    ("form", "text", "right"),
    [
        *((form, "x", False) for form in (*FORMATS, "date-time")),
        ("date", "0000-02-29", True), ("date", "2023-02-29", False), ("date", "20230228", False),
        ("time", "23:59:60.5z", True), ("time", "23:59:60+00:00", True),
        ("time", "24:00:00Z", False), ("time", "12:00:00", False),
        ("date-time", "2024-02-29t12:00:00Z", True), ("date-time", "2023-02-29T12:00:00Z", False),
    ],
)  # fmt: skip
def test_formats_are_told_apart(form: str, text: str, right: bool) -> None:
    assert CHECKER.conforms(text, form) is right


@cache
def worker() -> Worker:
    """The shipped model in FP32, whose answers do not depend on other requests."""
    return load_worker(ModelConfig(path="", dtype="float32"), CodecConfig())


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """One answer."""
    response = await client.post(path, json={"max_tokens": 1000, "seed": 1, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def validate(client: httpx.AsyncClient, schemas: Mapping[str, dict[str, Any]]) -> int:
    """Ask for an instance of each schema; return the number of answers that `max_tokens` cut.

    The penalty is needed because so small a model would never end some numbers.
    """
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(name: str, schema: dict[str, Any]) -> int:
        body = {"prompt": "def ", "guided_json": schema, "temperature": 0.8, "frequency_penalty": 0.5}
        async with places:
            answer = await post(client, "/v1/completions", **body)
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "length":
            return 1
        instance = json.loads(choice["text"])
        jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(instance)
        return 0

    return sum(await asyncio.gather(*(one(name, schema) for name, schema in schemas.items())))


@ROUTERS
async def test_answers_validate(workers: int) -> None:
    """A few schemas of every kind. The slow tests have 500."""
    schemas = {**REAL, **{str(seed): random_schema(seed) for seed in range(500, 530)}}
    async with in_process_cluster(SHIPPED, worker(), "inproc", 4, workers=workers) as client:
        assert await validate(client, schemas) <= len(schemas) // 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@WORKERS
async def test_500_random_schemas_validate(workers: int) -> None:
    schemas = {str(seed): random_schema(seed) for seed in range(500)}
    async with in_process_cluster(SHIPPED, worker(), "inproc", 4, workers=workers) as client:
        assert await validate(client, schemas) <= len(schemas) // 20


@ROUTERS
async def test_a_stream_of_a_guided_request_survives_its_decode_nodes(workers: int) -> None:
    """The first decode node gives its requests up in the middle. The other goes on with the same tokens."""
    nodes = list[DecodeService]()
    body = {"prompt": "def ", "guided_regex": "([a-z]{4} ){40}[0-9]{2}", "max_tokens": 400, "seed": 3, "n": 3}
    async with in_process_cluster(SHIPPED, worker(), "inproc", 4, decode_nodes=nodes, workers=workers) as client:
        calm = await post(client, "/v1/completions", **body)
        seen, texts = 0, ["", "", ""]
        async for choice in _stream(client, body):
            texts[choice["index"]] += choice["text"]
            seen += 1
            if seen == 20:
                await nodes[0].drain(0.0)
    assert texts == [choice["text"] for choice in calm["choices"]]
    drained = [dict((await node.describe()).stats)["hackkv_drained_total"] for node in nodes]
    replayed = [dict((await node.describe()).stats)["hackkv_replayed_tokens_total"] for node in nodes]
    assert drained[0] > 0
    assert replayed[1] > 0


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice


@ROUTERS
async def test_chat_with_formats_tools_and_streams(workers: int) -> None:
    async with in_process_cluster(SHIPPED, worker(), "inproc", 4, workers=workers) as client:
        path, schema = "/v1/chat/completions", REAL["classify"]
        asked = {"type": "json_schema", "json_schema": {"name": "label", "strict": True, "schema": schema}}
        answer = await post(client, path, messages=MESSAGES, response_format=asked, n=2, logprobs=True, top_logprobs=2)
        for choice in answer["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            assert choice["finish_reason"] == "stop"
        forced = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = (await post(client, path, **forced))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])
        named = {"type": "function", "function": {"name": "traffic"}}
        (choice,) = (await post(client, path, messages=MESSAGES, tools=TOOLS, tool_choice=named))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["traffic"]
        assert choice["finish_reason"] == "stop"
        history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": choice["message"]["tool_calls"]}]
        history.append({"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "fine"})
        answer = await post(client, path, messages=history, tools=TOOLS, max_tokens=8)
        assert answer["usage"]["completion_tokens"] > 0
