"""The demonstration: real requests through HTTP, what came back, where the time went and what crossed the wire."""

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

from hackkv.timing import Stage

CODE_PROMPT = '''def read_lines(path):
    """Return the lines of a text file, without their line ends."""
'''
CHAT_PROMPT = "Repeat this text:\nThe quick method returns a list of strings."
TOPICS = (
    "def __init__(self, name, value):\n",
    "import os\nimport sys\n\n\ndef main(",
    "for key in sorted(",
    "The :mod:`os` module provides",
    ".. function:: open(path)\n\n   Return",
    "   This function returns",
    "class Queue:\n    def put(self, item):\n",
    "try:\n    value = int(text)\nexcept ",
)
LONG_PROMPT = Path(__file__).read_text(encoding="utf-8")[:5000]
MAX_TOKENS = 48
SEED = 1
TIMEOUT_S = 120.0


async def demonstrate(url: str, model: str, console: Console) -> None:
    """Send a streamed, a chat, a long and eight concurrent requests; print texts, stages and bytes."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        console.rule("a streamed completion")
        streamed = await _stream(client, model, console)
        console.rule("a chat completion")
        chat = await _post(client, "/v1/chat/completions", _chat(model))
        console.print(CHAT_PROMPT, style="dim", markup=False)
        console.print(chat["choices"][0]["message"]["content"], markup=False)
        long = await _post(client, "/v1/completions", _completion(model, LONG_PROMPT))
        console.rule(f"{len(TOPICS)} completions at once")
        began = perf_counter()
        many = await asyncio.gather(*(_post(client, "/v1/completions", _completion(model, text)) for text in TOPICS))
        elapsed = perf_counter() - began
        for prompt, answer in zip(TOPICS, many, strict=True):
            text = " ".join((prompt + answer["choices"][0]["text"]).split())
            console.print(text if len(text) < 100 else text[:100] + " ...", markup=False)
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


def _completion(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "seed": SEED, "return_stages": True}


def _chat(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": CHAT_PROMPT}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "repetition_penalty": 1,  # the checkpoint proposes one, and this prompt asks for a repetition
        "return_stages": True,
    }


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    answer: dict[str, Any] = response.json()
    if response.is_error:
        raise RuntimeError(f"{path}: {response.status_code}: {answer}")
    return answer


async def _stream(client: httpx.AsyncClient, model: str, console: Console) -> dict[str, Any]:
    """Print a completion as it comes; return its closing chunk, which carries usage and stages."""
    body = {**_completion(model, CODE_PROMPT), "stream": True, "stream_options": {"include_usage": True}}
    console.print(CODE_PROMPT, style="dim", markup=False, end="")
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            last = json.loads(line.removeprefix("data: "))
            for choice in last["choices"]:
                console.print(choice["text"], end="", markup=False, soft_wrap=True)
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
    """What the handoffs weighed, by plane, against the same rows in FP16."""
    table = Table("plane", title="KV moved from prefill to decode, bytes", title_justify="left")
    table.caption = "open_k, open_v: a prompt's last page travels in FP16 until it is full; short prompts have no other"
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
