"""The demonstration: real requests through HTTP, what came back, where the time went and what crossed the wire.

Then one of them again, to a cluster with exact KV: what the codec changed in the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.cluster import Checked
from app.programs import ANSWERS, WRITES, Program
from hackkv.defaults import EXACT_CODEC
from hackkv.packaged import SHIPPED
from hackkv.timing import Stage
from hackkv.tokenizer import Tokenizer

SEED = 1
TIMEOUT_S = 120.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def program_for(served: Checked) -> Program:
    """What to ask a model."""
    folder = Path(served.folder)
    talks = folder != SHIPPED and (await asyncio.to_thread(Tokenizer, folder)).has_chat_template
    return ANSWERS if talks else WRITES


async def demonstrate(url: str, model: str, program: Program, console: Console) -> dict[str, Any]:
    """Send a streamed, a chat, a long and eight concurrent requests; print texts, stages and bytes.

    Returns the answer to the long one.
    """
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        console.rule("a streamed answer" if program.talks else "a streamed completion")
        streamed = await _stream(client, model, program, console)
        console.rule("a chat completion")
        body = _settings(model, program) | program.chat_sampling
        chat = await _post(client, CHAT, body | {"messages": _messages(program.chat)})
        console.print(program.chat, style="dim", markup=False)
        console.print(_text(chat), markup=False)
        long = await _post(client, *_long_request(model, program))
        console.rule(f"{len(program.topics)} {'questions' if program.talks else 'completions'} at once")
        began = perf_counter()
        requests = [_request(model, program, text) for text in program.topics]
        many = await asyncio.gather(*(_post(client, *request) for request in requests))
        elapsed = perf_counter() - began
        for prompt, answer in zip(program.topics, many, strict=True):
            text = " ".join(f"{prompt}{' ' if program.talks else ''}{_text(answer)}".split())
            console.print(text if len(text) < program.shown else text[: program.shown] + " ...", markup=False)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in many)
    console.print(f"[dim]{tokens} tokens in {elapsed:.2f} s[/]")
    groups = {
        "streamed": [streamed["hackkv"]],
        "chat": [chat["hackkv"]],
        f"prompt of {long['usage']['prompt_tokens']} tokens": [long["hackkv"]],
        f"{len(many)} at once (mean)": [answer["hackkv"] for answer in many],
    }
    _print_stages(console, groups)
    _print_bytes(console, groups)
    return long


async def compare(url: str, model: str, program: Program, codec: str, answer: dict[str, Any], console: Console) -> None:
    """Send the long request to a cluster with exact KV, and print its answer beside that with `codec`."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        exact = await _post(client, *_long_request(model, program))
    first, *_, question = program.long.strip().splitlines()
    console.rule(f"a prompt of {answer['usage']['prompt_tokens']} tokens, with KV in {codec} and with exact KV")
    console.print(f"{first} [...] {question}", style="dim", markup=False)
    table = Table(codec, EXACT_CODEC, show_lines=True)
    table.add_row(Text(_text(answer)), Text(_text(exact)))
    console.print(table)


def _settings(model: str, program: Program) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": program.max_tokens,
        "seed": SEED,
        "return_stages": True,
        **program.sampling,
    }


def _request(model: str, program: Program, prompt: str) -> tuple[str, dict[str, Any]]:
    """Path and body of the request that brings `prompt` before the model."""
    settings = _settings(model, program)
    if program.talks:
        return CHAT, settings | {"messages": _messages(prompt)}
    return COMPLETIONS, settings | {"prompt": prompt}


def _long_request(model: str, program: Program) -> tuple[str, dict[str, Any]]:
    path, body = _request(model, program, program.long)
    return path, body | program.long_sampling


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _text(answer: dict[str, Any]) -> str:
    """The text of a whole answer or of one chunk, whichever of the two paths it comes from."""
    choice = answer["choices"][0]
    text: str | None = (choice.get("message") or choice.get("delta") or {}).get("content", choice.get("text"))
    return text or ""


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    answer: dict[str, Any] = response.json()
    if response.is_error:
        raise RuntimeError(f"{path}: {response.status_code}: {answer}")
    return answer


async def _stream(client: httpx.AsyncClient, model: str, program: Program, console: Console) -> dict[str, Any]:
    """Print an answer as it comes; return its closing chunk, which carries usage and stages."""
    path, body = _request(model, program, program.streamed)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    console.print(program.streamed, style="dim", markup=False, end="\n" if program.talks else "")
    last: dict[str, Any] = {}
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            last = json.loads(line.removeprefix("data: "))
            if "error" in last:
                raise RuntimeError(f"{path}: {last['error']}")
            if last["choices"]:
                console.print(_text(last), end="", markup=False, soft_wrap=True)
    console.print()
    return last


def _print_stages(console: Console, groups: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Job completion time by stage, in milliseconds, a column per group of requests."""
    table = Table("stage", title="job completion time by stage, ms", title_justify="left")
    for name in groups:
        table.add_column(name, justify="right")
    for stage in Stage:
        table.add_row(stage, *(_mean_ms([report["stages"][stage] for report in group]) for group in groups.values()))
    table.add_section()
    totals = (_mean_ms([report["total_s"] for report in group]) for group in groups.values())
    table.add_row("total", *totals, style="bold")
    console.print(table)


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{1000 * sum(seconds) / len(seconds):.1f}"


def _print_bytes(console: Console, groups: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print the bytes of the handoffs, by plane, against the same rows in FP16."""
    table = Table("plane", title="KV moved from prefill to decode, bytes", title_justify="left")
    table.caption = "open_k, open_v: rows that travel in FP16, of a page that is not full and of pages that stay exact"
    table.caption_justify = "left"
    for name in groups:
        table.add_column(name.removesuffix(" (mean)"), justify="right")
    columns = [_planes(group) for group in groups.values()]
    for plane in dict.fromkeys(plane for column in columns for plane in column):
        table.add_row(plane, *(f"{column.get(plane, 0):,}" for column in columns))
    totals = [sum(column.values()) for column in columns]
    fp16 = [sum(report["kv"]["fp16_bytes"] for report in group) for group in groups.values()]
    table.add_section()
    table.add_row("total", *(f"{total:,}" for total in totals), style="bold")
    table.add_row("the same in FP16", *(f"{size:,}" for size in fp16))
    table.add_row("ratio", *(f"{total / size:.3f}" for total, size in zip(totals, fp16, strict=True)), style="bold")
    console.print(table)


def _planes(group: Sequence[dict[str, Any]]) -> dict[str, int]:
    planes: Counter[str] = Counter()
    for report in group:
        planes.update(report["kv"]["bytes_by_plane"])
        planes["headers"] += report["kv"]["header_bytes"]
    return planes
