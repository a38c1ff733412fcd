"""Large bodies are parsed off the event loop, in turn. A job ends when its client leaves or its time is up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hackkv.errors import Cancelled, DeadlineExceeded, HackkvError, RequestError, Unavailable
from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.caller import Caller
from router.api.fair_line import LARGE
from router.api.parser import LARGE_NICENESS, NICENESS
from router.api.prompts import SMALL, PromptParser
from router.api.schema import ChatRequest, CompletionRequest
from router.packets import pack, read_packet
from tests.polling import POLL_S
from tests.router.conftest import check_error, make_served
from tests.router.scripted import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_NICENESS = 19
"""The largest niceness on Linux."""


class Leaving:
    """A client that leaves when it is told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> Any:
        """The next message of the server's side."""
        await self.gone.wait()
        return {"type": "http.disconnect"}


def large(**fields: Any) -> bytes:
    """A body that is not parsed on the event loop."""
    return json.dumps({**fields, "user": "x" * SMALL}).encode()


@pytest.fixture
async def prompts(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[PromptParser]:
    """The parser of a model over a scripted cluster."""
    prompts = make_served(cluster, tokenizer).prompts
    yield prompts
    await prompts.parsers.close()


@pytest.fixture
def refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process must not parse or tokenize."""

    def fail(*_: object) -> None:
        raise AssertionError("the event loop was to do this work")

    monkeypatch.setattr("router.api.prompts.validate", fail)
    monkeypatch.setattr("router.api.prompts.tokenize", fail)


@pytest.mark.usefixtures("refused_here")
async def test_large_bodies_are_parsed_elsewhere_and_come_back_the_same(
    prompts: PromptParser, tokenizer: Tokenizer
) -> None:
    caller = Caller(Leaving())
    text = await prompts.parse(CompletionRequest, large(prompt=["fox", "dog"], n=2, seed=7), caller, "a")
    assert text.prompts == [tuple(tokenizer.encode("fox")), tuple(tokenizer.encode("dog"))]
    assert (text.body.prompt, text.body.n, text.body.seed) == (("", ""), 2, 7)
    ids = await prompts.parse(CompletionRequest, large(prompt=[97, 98], echo=True), caller, "a")
    assert (ids.prompts, ids.body.prompt) == ([(97, 98)], ((),))
    echo = await prompts.parse(CompletionRequest, large(prompt="fox\n\u00e9", echo=True), caller, "a")
    assert echo.body.prompt == ("fox\n\u00e9",)
    messages = [{"role": "user", "content": "hi"}]
    chat = await prompts.parse(ChatRequest, large(messages=messages, logit_bias={"5": 1}), caller, "a")
    assert chat.prompts == [tuple(tokenizer.chat(messages))]
    assert chat.body.logit_bias == ((5, 1.0),)


REFUSED: list[tuple[type[CompletionRequest | ChatRequest], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": 7}, "prompt"),
    (CompletionRequest, {"prompt": [97] * 401}, "prompt"),
    (CompletionRequest, {"prompt": ["x"] * 33}, "n"),
    (CompletionRequest, {"prompt": [5000]}, "prompt"),
    (CompletionRequest, {"prompt": "x", "what": 1}, "what"),
    (ChatRequest, {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    (ChatRequest, {"messages": [1] * 10_000}, "messages"),
    (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * 20_000}, "messages"),
    (CompletionRequest, {"prompt": "x", "metadata": "y" * (1 << 20)}, ""),
]


@pytest.mark.usefixtures("refused_here")
async def test_refusals_of_large_bodies_name_the_field(prompts: PromptParser) -> None:
    """Children of one process parse them."""
    for kind, fields, param in REFUSED:
        with pytest.raises(RequestError) as refused:
            await prompts.parse(kind, large(**fields), Caller(Leaving()), "a")
        assert (refused.value.param or "").startswith(param), str(fields)[:40]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    prompts: PromptParser, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("was tokenized"))
    with pytest.raises(RequestError, match=r"prompt has at least \d+ tokens; this model serves at most 400"):
        await prompts.parse(CompletionRequest, json.dumps({"prompt": "x" * 4000}).encode(), Caller(Leaving()), "a")


@pytest.fixture
def slow_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose chat template never ends within the life of a test."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    loops = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}x"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": loops}))
    return tmp_path


@pytest.fixture
async def stuck(cluster: Cluster, slow_checkpoint: Path) -> AsyncIterator[PromptParser]:
    """A parser in which every conversation takes for ever, but completions do not."""
    prompts = make_served(cluster, Tokenizer(slow_checkpoint), deadlines={"tokenize_s": 600}).prompts
    yield prompts
    await prompts.parsers.close()


FOREVER = large(messages=[{"role": "user", "content": "x"}])
HUGE = json.dumps({"messages": [{"role": "user", "content": "x"}], "user": "y" * (1 << 19)}).encode()


async def children(prompts: PromptParser, count: int) -> None:
    """Wait until so many jobs are at work."""
    while prompts.parsers.jobs != count:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def processes(parent: int) -> list[str]:
    """Children of a process."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


async def test_others_are_served_while_large_prompts_are_parsed(cluster: Cluster, slow_checkpoint: Path) -> None:
    served = make_served(cluster, Tokenizer(slow_checkpoint), deadlines={"tokenize_s": 600})
    app = build_app(served)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        long = asyncio.create_task(client.post(CHAT, content=HUGE, headers={"content-type": "application/json"}))
        await children(served.prompts, 1)
        assert (await client.get("/live")).status_code == 200
        short = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
        assert short.json()["usage"]["completion_tokens"] == 3
        beside = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "user": "y" * SMALL})
        assert beside.json()["usage"]["completion_tokens"] == 3  # large prompts leave a place to others
        assert not long.done()
        long.cancel()
        await asyncio.wait([long])
    await served.prompts.parsers.close()


async def test_parsing_has_a_deadline(cluster: Cluster, slow_checkpoint: Path) -> None:
    served = make_served(cluster, Tokenizer(slow_checkpoint), deadlines={"tokenize_s": 0.05})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(served)), base_url="http://router") as client:
        answer = await client.post(CHAT, content=FOREVER, headers={"content-type": "application/json"})
        assert "reading the request took too long" in check_error(answer, 504)["message"]
    await served.prompts.parsers.close()


async def test_the_process_ends_when_the_client_leaves(stuck: PromptParser) -> None:
    client = Leaving()
    parsing = asyncio.create_task(stuck.parse(ChatRequest, FOREVER, Caller(client), "a"))
    await children(stuck, 1)
    parent = stuck.parsers.pid
    while not processes(parent):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    (child,) = processes(parent)
    client.gone.set()
    with pytest.raises(Cancelled):
        await parsing
    while child in processes(parent):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    assert stuck.parsers.jobs == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_process_that_dies_is_an_error_and_the_next_job_has_a_new_one(stuck: PromptParser) -> None:
    parsing = asyncio.create_task(stuck.parse(ChatRequest, FOREVER, Caller(Leaving()), "a"))
    await children(stuck, 1)
    first = stuck.parsers.pid
    while not processes(first):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    (child,) = processes(first)
    os.kill(int(child), 9)
    with pytest.raises(Unavailable):
        await parsing
    os.kill(first, 9)
    while True:  # jobs fail until the end of the process is noticed
        try:
            parsed = await stuck.parse(CompletionRequest, large(prompt="x"), Caller(Leaving()), "a")
            break
        except HackkvError as error:
            assert isinstance(error, Unavailable | DeadlineExceeded)  # noqa: PT017
    assert len(parsed.prompts) == 1
    assert stuck.parsers.pid != first


async def test_the_process_ends_with_the_router(stuck: PromptParser) -> None:
    await stuck.parse(CompletionRequest, large(prompt="x"), Caller(Leaving()), "a")
    parent = stuck.parsers.pid
    await stuck.parsers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(parent, 0)


async def test_nothing_is_parsed_before_a_node_has_said_how_much_fits(tokenizer: Tokenizer) -> None:
    prompts = make_served(Cluster(), tokenizer).prompts
    with pytest.raises(Unavailable):
        await prompts.parse(CompletionRequest, large(prompt="x"), Caller(Leaving()), "a")
    assert prompts.parsers.jobs == 0


TELLING = """
import os, socket, sys
from router.api import parser
parser._job, parser.answer = dict, lambda *_: ({"niceness": os.nice(0)}, b"")
sys.exit(parser.main(None, socket.socket(fileno=sys.stdin.fileno())))
"""
"""A parser process whose answer is the niceness with which it was made."""


@pytest.mark.parametrize(("size", "niceness"), [(LARGE - 1, NICENESS), (LARGE, LARGE_NICENESS)])
async def test_a_large_body_is_parsed_with_less_priority(size: int, niceness: int) -> None:
    control, its_control = socket.socketpair()
    with control:
        with its_control:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", TELLING, stdin=its_control.fileno())
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"j"], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        body = bytes(size)
        writer.write(pack({}, body) + body)
        told, _ = await read_packet(reader)
        writer.close()
    assert await process.wait() == 0
    assert told == {"niceness": min(MOST_NICENESS, os.nice(0) + niceness)}
