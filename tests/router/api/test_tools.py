"""Tools and thoughts over the HTTP API: the prompt of the model and the client's answer, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.router.conftest import TEMPLATE
from tests.router.scripted import Cluster
from tests.router.speaking import shown, speaking_app

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
]
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>'
NATIVE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{% endif %}{% for m in messages %}<|turn|>"
    "{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.arguments.zone }}]{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
THINKS = TEMPLATE + "{# </think> #}"


@asynccontextmanager
async def speaking(checkpoint: Path, folder: Path, cluster: Cluster, answer: str, template: str) -> AsyncIterator[Any]:
    """The official client of a model with that template, which says `answer` to everything."""
    app = speaking_app(checkpoint, folder, cluster, answer, template)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http:
        yield AsyncOpenAI(api_key="none", base_url="http://router/v1", http_client=http, max_retries=0)


@pytest.mark.parametrize("template", [TEMPLATE, NATIVE])
async def test_a_call_is_read_whole_and_streamed_alike(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, template: str
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, "Let me see. " + CALL, template) as client:
        asked = {"model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": 200}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {"zone": "é"})
        assert call.id.startswith("call_")


@pytest.mark.parametrize("dumped", [False, True], ids=["message", "dump"])
@pytest.mark.parametrize("streamed", [False, True], ids=["parsed", "streamed"])
async def test_a_call_that_a_helper_of_the_client_read_can_be_sent_back(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, streamed: bool, dumped: bool
) -> None:
    """openai's helpers put `parsed` and `parsed_arguments` into the message."""
    strict = {"name": "clock", "strict": True, "parameters": {"type": "object", "properties": {"zone": {}}}}
    async with speaking(checkpoint, tmp_path, cluster, CALL, NATIVE) as client:
        asked: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", "function": strict}]}
        if streamed:
            async with client.chat.completions.stream(messages=[USER], max_tokens=200, **asked) as stream:
                message = (await stream.get_final_completion()).choices[0].message
        else:
            parsed = await client.chat.completions.parse(messages=[USER], max_tokens=200, **asked)
            message = parsed.choices[0].message
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == {"zone": "é"}
        sent = [USER, message.model_dump() if dumped else message, USER]
        await client.chat.completions.create(messages=sent, max_tokens=1, **asked)
    assert f"[{call.id} é]" in shown(cluster, checkpoint)


async def test_the_model_sees_tools_and_earlier_calls_in_its_own_format(
    checkpoint: Path, tmp_path: Path, cluster: Cluster
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, CALL, NATIVE) as client:
        asked = {"model": "tiny", "tools": TOOLS, "max_tokens": 200}
        first = (await client.chat.completions.create(messages=[USER], **asked)).choices[0].message
        reply = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noon"}
        sent = [USER, first.model_dump(exclude_none=True, exclude={"reasoning_content"}), reply]
        await client.chat.completions.create(messages=sent, **asked)
    text, call = shown(cluster, checkpoint), first.tool_calls[0].id
    assert '"name": "clock"' in text
    assert f"[{call} é]" in text
    assert f"tool:noon{call}" in text


@pytest.mark.parametrize("tokens", range(1, len(CALL.encode()), 7))
async def test_a_call_that_was_cut_off_can_be_sent_back(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, tokens: int
) -> None:
    """The place of the cut does not matter. The model sees the arguments up to there."""
    async with speaking(checkpoint, tmp_path, cluster, CALL, NATIVE) as client:
        asked = {"model": "tiny", "tools": TOOLS}
        first = await client.chat.completions.create(messages=[USER], max_tokens=tokens, **asked)
        message = first.choices[0].message
        await client.chat.completions.create(messages=[USER, message.model_dump(), USER], max_tokens=1, **asked)
    text = shown(cluster, checkpoint)
    for call in message.tool_calls or ():
        zone = re.fullmatch('(?:{"zone": "([^"]*)"?}?|.*)', call.function.arguments, re.DOTALL)
        assert zone
        assert f"[{call.id} {zone[1] or ''}]" in text


@pytest.mark.parametrize("template", [TEMPLATE, NATIVE.replace("arguments.zone", "arguments")])
@pytest.mark.parametrize("arguments", ["{zone: Oslo}", "{'zone': 'Oslo'}", '{"zone": True}', '{"zone": "a\nb"}', "{,}"])
async def test_arguments_that_are_no_json_can_be_sent_back(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, arguments: str, template: str
) -> None:
    """A model may write such arguments, and sees them again as it wrote them."""
    call = f'<tool_call>\n{{"name": "clock", "arguments": {arguments}}}\n</tool_call>'
    async with speaking(checkpoint, tmp_path, cluster, call, template) as client:
        asked = {"model": "tiny", "tools": TOOLS, "max_tokens": 200}
        message = (await client.chat.completions.create(messages=[USER], **asked)).choices[0].message
        assert [call.function.arguments for call in message.tool_calls] == [arguments]
        await client.chat.completions.create(messages=[USER, message.model_dump(), USER], **asked | {"max_tokens": 1})
    shown_again = json.dumps(arguments) if template == TEMPLATE else arguments
    assert shown_again in shown(cluster, checkpoint)


async def test_a_model_whose_template_knows_no_tools_is_told_in_the_systems_message(
    checkpoint: Path, tmp_path: Path, cluster: Cluster
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked_for = [{"role": "system", "content": "Be brief."}, USER]
    done = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "noon"}]
    history = [*asked_for, *done]
    async with speaking(checkpoint, tmp_path, cluster, "It is noon.", TEMPLATE) as client:
        asked = {"model": "tiny", "messages": history, "max_tokens": 8}
        choice = (await client.chat.completions.create(tools=TOOLS, **asked)).choices[0]
        text = shown(cluster, checkpoint)
        assert "Be brief.\n\nYou may call functions." in text
        assert '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in text
        assert "user:<tool_response>\nnoon\n</tool_response>" in text
        assert choice.message.tool_calls is None
        await client.chat.completions.create(tools=TOOLS, tool_choice="none", **asked)
    assert "You may call" not in shown(cluster, checkpoint)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_allowed_tools_alone_the_model_is_told(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, mode: str
) -> None:
    other = {"type": "function", "function": {"name": "calendar"}}
    named = {"type": "function", "function": {"name": "clock"}}
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 200, "tools": [other, *TOOLS]}
    async with speaking(checkpoint, tmp_path, cluster, CALL, NATIVE) as client:
        allowed: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        choice = (await client.chat.completions.create(tool_choice=allowed, **asked)).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["clock"]
        assert choice.finish_reason == "tool_calls"
        assert bool(cluster.jobs[-1].request.sampling.grammar) == (mode == "required")
        assert "calendar" not in shown(cluster, checkpoint)
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
        tools = [{"type": "function", **tool["function"]} for tool in asked["tools"]]
        answer = await client.responses.create(
            model="tiny", input=[USER], max_output_tokens=200, tools=tools, tool_choice=allowed
        )
        assert [item.name for item in answer.output if item.type == "function_call"] == ["clock"]
        assert answer.tool_choice.model_dump(exclude_none=True) == allowed
        assert "calendar" not in shown(cluster, checkpoint)


@pytest.mark.parametrize(
    ("template", "answer", "thought", "content"),
    [
        (THINKS, "<think>well</think>\n\nyes", "well", "yes"),
        (THINKS, "yes", None, "yes"),
        (THINKS.replace("assistant:", "assistant:<think>\n"), "well</think>yes", "well", "yes"),
        (TEMPLATE, "<think>well</think>yes", None, "<think>well</think>yes"),
    ],
)
async def test_thoughts_are_told_from_the_answer(
    checkpoint: Path, tmp_path: Path, cluster: Cluster, template: str, answer: str, thought: str | None, content: str
) -> None:
    async with speaking(checkpoint, tmp_path, cluster, answer, template) as client:
        asked = {"model": "tiny", "messages": [USER], "max_tokens": 100}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        said, thoughts = "", ""
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            said += chunk.choices[0].delta.content or ""
            thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (message.content, getattr(message, "reasoning_content", None)) == (content, thought)
    assert (said, thoughts) == (content, thought or "")
