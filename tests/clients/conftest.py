"""`hackkv serve` with the shipped model, for packages in environments of their own (`make clients-test`).

This module imports nothing of hackkv: the packages under test may have conflicting requirements.
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
    """Run a server within the `with` block; give its base URL, which ends with /v1."""
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
"""(tokens in, tokens out) -> number of requests."""


def served_to(base_url: str, folder: Path, tool: str, *arguments: str, **environment: str) -> Counted:
    """Run a tool of this virtual environment to its end in `folder`, with more variables in its environment. Count the
    requests that ended at the server meanwhile. None of them may have failed."""
    before = _ended(base_url, 0)
    command = (str(Path(sys.executable).with_name(tool)), *arguments)
    variables = os.environ | environment
    ran = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=TOOL_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ended = _ended(base_url, max((one["seq"] for one in before), default=0))
    assert {one["outcome"] for one in ended} == {"length"}
    return Counter((one["prompt_tokens"], one["output_tokens"]) for one in ended)


def called(name: str, arguments: str, result: str) -> list[dict[str, Any]]:
    """The messages of a tool call and its result in OpenAI's API, without fields that clients add."""
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_0", "content": result}]


def prompt_tokens(base_url: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> int:
    """The number of tokens that the model is shown of a conversation. Asserts that they contain its texts and calls, in
    order."""
    conversation = {"messages": list(messages), "tools": list(tools)}
    tokens: list[int] = _asked(base_url, "/tokenize", conversation)["tokens"]
    rest = _asked(base_url, "/detokenize", {"tokens": tokens})["prompt"]
    for message in messages:
        for text in _texts(message):
            _, found, rest = rest.partition(text)
            assert found, text
    return len(tokens)


def _texts(message: dict[str, Any]) -> Iterator[str]:
    """The texts of a message that the model is shown."""
    if "content" in message:
        yield message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})


def _ended(base_url: str, after: int) -> list[dict[str, Any]]:
    ended: list[dict[str, Any]] = _asked(base_url, f"/api/requests?after={after}")["ended"]
    return ended


def _asked(base_url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer to a plain HTTP request: a GET, or a POST if there is a body."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = Request(base_url.removesuffix("/v1") + path, None if body is None else json.dumps(body).encode(), headers)
    with urlopen(request, timeout=START_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _address(server: subprocess.Popen[bytes], folder: Path) -> str:
    """The base URL of the server, from its curl line."""
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if found := re.search(r"http://\S+?/v1", (folder / "out").read_text()):
            return found.group()
        assert server.poll() is None, (folder / "err").read_text()
        time.sleep(0.1)
    raise AssertionError(f"hackkv serve does not serve: {(folder / 'err').read_text()}")
