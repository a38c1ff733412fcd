"""An application whose model has a given chat template and always answers with a given text."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
from starlette.types import ASGIApp

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from tests.router.conftest import make_served
from tests.router.scripted import Cluster


def speaking_app(checkpoint: Path, folder: Path, cluster: Cluster, answer: str, template: str) -> ASGIApp:
    """The HTTP API over `cluster`. `folder` gets a copy of `checkpoint` with the template."""
    path = shutil.copytree(checkpoint, folder / "checkpoint")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    tokenizer = Tokenizer(path)
    cluster.script.answer = lambda request: [*tokenizer.encode(answer), tokenizer.encode("</s>")[0]]
    return build_app(make_served(cluster, tokenizer))


@asynccontextmanager
async def speaking_http(
    checkpoint: Path, folder: Path, cluster: Cluster, answer: str, template: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """The HTTP client for official API clients, connected to `speaking_app`."""
    app = speaking_app(checkpoint, folder, cluster, answer, template)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http:
        yield http


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events. Asserts that the name of each event is its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def shown(cluster: Cluster, checkpoint: Path) -> str:
    """The prompt of the latest request on the last node that had one."""
    return _prompts(cluster, checkpoint)[-1]


def longest_shown(cluster: Cluster, checkpoint: Path) -> str:
    """The longest prompt. In a conversation that is the latest one."""
    return max(_prompts(cluster, checkpoint), key=len)


def _prompts(cluster: Cluster, checkpoint: Path) -> list[str]:
    tokenizer = Tokenizer(checkpoint)
    jobs = cluster.jobs
    return [tokenizer.decode(job.request.prompt_ids, skip_special_tokens=False) for job in jobs]
