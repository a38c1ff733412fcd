"""`hackkv serve` with the model that ships along, for packages in environments of their own (`make clients-test`).

Nothing of hackkv is imported here: the packages under test need not agree with its requirements.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
HACKKV = Path(os.environ.get("HACKKV", ROOT / ".venv" / "bin" / "hackkv"))
MODEL = "hackkv-small"
KEY = "sk-clients"
START_S = 240.0
STOP_S = 240.0
TOOL_S = 600.0
TOKENIZER = ROOT / "hackkv" / "shipped"


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[str]:
    """A server for the body of `with`; gives the address that clients are told, with /v1."""
    small = ("--prefill", "1", "--decode", "1", "--port", "0", "--max-context", "512")
    command = (str(HACKKV), "serve", *small, "--served-model-name", MODEL, *flags)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        server = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        yield _address(server, folder)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(STOP_S)


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that asks for `KEY`."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "keys").write_text(KEY)
    with serving(folder, "--api-key-file", str(folder / "keys")) as url:
        yield url


Counted = Counter[tuple[int, int]]
"""Tokens in and out of requests -> how many there were."""


def served_to(base_url: str, folder: Path, tool: str, *arguments: str) -> Counted:
    """Run a tool of this environment to its end in `folder`; returns what the server says of the requests that ended
    meanwhile, none of which may have failed."""
    before = _ended(base_url, 0)
    command = (str(Path(sys.executable).with_name(tool)), *arguments)
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TOOL_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ended = _ended(base_url, max((one["seq"] for one in before), default=0))
    assert {one["outcome"] for one in ended} == {"length"}
    return Counter((one["prompt_tokens"], one["output_tokens"]) for one in ended)


def called(name: str, arguments: str, result: str) -> list[dict[str, Any]]:
    """A call and its result as OpenAI's API has them, without what clients add."""
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_0", "content": result}]


def prompt_tokens(base_url: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> int:
    """Tokens that the model is shown of a conversation. Its texts and calls are among them, one behind the other."""
    conversation = {"messages": list(messages), "tools": list(tools)}
    tokens: list[int] = _asked(base_url, "/tokenize", conversation)["tokens"]
    rest = _asked(base_url, "/detokenize", {"tokens": tokens})["prompt"]
    for message in messages:
        for text in _texts(message):
            _, found, rest = rest.partition(text)
            assert found, text
    return len(tokens)


def _texts(message: dict[str, Any]) -> Iterator[str]:
    """What the model reads of a message."""
    if "content" in message:
        yield message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})


def _ended(base_url: str, after: int) -> list[dict[str, Any]]:
    ended: list[dict[str, Any]] = _asked(base_url, f"/api/requests?after={after}")["ended"]
    return ended


def _asked(base_url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server answers to a request without a client: a GET, or a POST of a body."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = Request(base_url.removesuffix("/v1") + path, None if body is None else json.dumps(body).encode(), headers)
    with urlopen(request, timeout=START_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _address(server: subprocess.Popen[bytes], folder: Path) -> str:
    """Where the server serves, as its curl line says."""
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if found := re.search(r"http://\S+?/v1", (folder / "out").read_text()):
            return found.group()
        assert server.poll() is None, (folder / "err").read_text()
        time.sleep(0.1)
    raise AssertionError(f"hackkv serve does not serve: {(folder / 'err').read_text()}")
