"""Long prompts are tokenized beside the event loop: others are served meanwhile, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hackkv.errors import Cancelled
from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.caller import Caller
from router.api.prompts import LONG_TEXT, THREADS
from router.config import DeadlinesConfig
from tests.router.conftest import check_error, make_served
from tests.router.scripted import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "dog" * LONG_TEXT


class HeldTokenizer(Tokenizer):
    """Takes as long for a long text as the test says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()
        self.begun: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        if len(text) >= LONG_TEXT:
            self.begun.append(text)
            self.go.wait()
        return super().encode(text, add_special_tokens)


@pytest.fixture
def held(checkpoint: Path) -> Iterator[HeldTokenizer]:
    """A tokenizer that is let go at the end."""
    tokenizer = HeldTokenizer(checkpoint)
    yield tokenizer
    tokenizer.go.set()


def client_of(cluster: Cluster, held: HeldTokenizer, tokenize_s: float = 60.0) -> httpx.AsyncClient:
    """A client of the HTTP API."""
    app = build_app(make_served(cluster, held, DeadlinesConfig(tokenize_s=tokenize_s)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


class Leaving:
    """A client that leaves when it is told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> Any:
        """The next message of the server's side."""
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def begun(held: HeldTokenizer, count: int) -> None:
    """Wait until so many long texts are being tokenized."""
    while len(held.begun) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": ["x", LONG]}),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: str(value)[:30])
async def test_others_are_served_while_a_long_prompt_is_tokenized(
    cluster: Cluster, held: HeldTokenizer, path: str, body: dict[str, Any]
) -> None:
    async with client_of(cluster, held) as client:
        long = asyncio.create_task(client.post(path, json=body))
        await begun(held, 1)
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        short = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
        assert short.json()["usage"]["completion_tokens"] == 3
        assert not long.done()
        held.go.set()
        assert "tokens; this model serves at most" in check_error(await long, 400)["message"]


async def test_tokenizing_has_a_deadline(cluster: Cluster, held: HeldTokenizer) -> None:
    async with client_of(cluster, held, tokenize_s=0.01) as client:
        assert "tokenizing" in check_error(await client.post(COMPLETIONS, json={"prompt": LONG}), 504)["message"]


async def test_a_client_that_leaves_is_not_tokenized_for(cluster: Cluster, held: HeldTokenizer) -> None:
    prompts = make_served(cluster, held).prompts
    clients = [Leaving() for _ in range(THREADS + 1)]
    texts = [LONG + str(number) for number in range(len(clients))]
    encoding = [
        asyncio.create_task(prompts.encode([text], True, Caller(client)))
        for text, client in zip(texts, clients, strict=True)
    ]
    await begun(held, THREADS)
    for client in clients[1:]:  # one of them is being tokenized for, the last stands in line
        client.gone.set()
    for task in encoding[1:]:
        with pytest.raises(Cancelled):
            await task
    held.go.set()
    assert await encoding[0] == [tuple(held.encode(texts[0]))]
    assert texts[-1] not in held.begun
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_long_prompts_stand_in_line_in_the_order_of_their_arrival(cluster: Cluster, held: HeldTokenizer) -> None:
    prompts = make_served(cluster, held).prompts
    texts = [LONG + str(number) for number in range(3 * THREADS)]
    encoding = [asyncio.create_task(prompts.encode([text], True, Caller(Leaving()))) for text in texts]
    await begun(held, THREADS)
    held.go.set()
    results = await asyncio.gather(*encoding)
    assert [ids for (ids,) in results] == [tuple(held.encode(text)) for text in texts]
    assert sorted(held.begun[:THREADS]) == texts[:THREADS]
    assert sorted(held.begun[: len(texts)]) == texts
