"""Roles and commands as processes of the operating system, with a configuration file, an exit code and output.

Only `until` waits by polling in these tests. All other waits are for events.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from node.announcement import read_announcement
from tests.router.processes import NO_TLS, series

START_S = 240.0
KILL_S = 60.0
"""Timeouts for processes that hang. They do not test speed: a machine may be slow and busy."""
ENVIRONMENT = {**os.environ, "GRPC_VERBOSITY": "ERROR"}


def until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Poll until `condition` is true; return the seconds that this took. A failure names `what`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


class Child:
    """A process and its output."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], stdin: int = subprocess.DEVNULL) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._out, self._err = name, folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=err, env=ENVIRONMENT)

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text(encoding="utf-8")

    def ready(self) -> dict[str, str]:
        """Wait for the announcement of the process; return its fields."""
        lines: list[dict[str, str]] = []

        def announced() -> bool:
            assert self.process.poll() is None, f"{self.name} ended: {self.err}"
            lines[:] = filter(None, map(read_announcement, self.out.splitlines()))
            return bool(lines)

        until(announced, START_S, f"{self.name} is ready")
        return lines[0]

    def serving(self) -> str:
        """Wait until `hackkv serve` serves; return the address in its curl line."""
        until(lambda: "curl" in self.out or self.process.poll() is not None, START_S, "the cluster serves")
        found = re.search(r"http://\S+(?=/v1)", self.out)
        assert found, self.err
        return found.group()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the process; return the exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        self.process.kill()  # before standard input is closed: a supervised role would drain at its end
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(KILL_S)


def role(folder: Path, kind: str, name: str, settings: dict[str, Any]) -> Child:
    """Start one role with a configuration file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump({"log_level": "warning", **settings}), encoding="utf-8")
    command = hackkv_command(kind, "--config", str(config), "--supervised")
    # The pipe stays open as long as this process lives. With `--supervised` the role ends when the pipe does.
    return Child(folder, name, command, stdin=subprocess.PIPE)


def hackkv(folder: Path, name: str, *arguments: str) -> Child:
    """Start the command `hackkv`."""
    return Child(folder, name, hackkv_command(*arguments))


def hackkv_command(*arguments: str) -> tuple[str, ...]:
    """The command `hackkv`, run by this interpreter. -P keeps modules of the current directory out."""
    return (sys.executable, "-P", "-c", "from app.cli import app; app()", *arguments)


@dataclass(frozen=True, slots=True)
class Api:
    """The HTTP side of a cluster."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[str, int]:
        """Role -> number of nodes that the router knows."""
        counted: dict[str, int] = httpx.get(f"{self.url}/ready", timeout=START_S, verify=NO_TLS).json()["nodes"]
        return counted

    def complete(self, prompt: Sequence[int] | str, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Request one greedy completion; return the answer. Tokens are under `choices`, statistics under `hackkv`."""
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "return_stages": True}
        body = {"prompt": prompt, "max_tokens": max_tokens, **fixed, **more}
        url = f"{self.url}/v1/completions"
        response = httpx.post(url, json=body, headers=self.headers, timeout=START_S, verify=NO_TLS)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextlib.contextmanager
    def asked(
        self, clients: int, prompt: Sequence[int], max_tokens: int, **more: Any
    ) -> Iterator[list[dict[str, Any]]]:
        """Let `clients` clients repeat one request until the body ends: so a fast cluster is as busy as a slow one.
        The list has all answers when the body has ended."""
        answers: list[dict[str, Any]] = []
        enough = threading.Event()

        def ask() -> None:
            while not enough.is_set():
                answers.append(self.complete(prompt, max_tokens, **more))

        threads = [threading.Thread(target=ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            enough.set()
            for thread in threads:
                thread.join(START_S)
        assert not any(thread.is_alive() for thread in threads), "a client still waits for its answer"

    def metrics(self) -> dict[str, float]:
        """The series of `/metrics`: 'name{labels}' -> value."""
        return series(httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=START_S, verify=NO_TLS).text)


class Fleet:
    """A router, a prefill node and decode nodes, each a process of its own."""

    def __init__(
        self, folder: Path, model: Path, codec: dict[str, Any], router: dict[str, Any], num_decode: int
    ) -> None:
        self._folder = folder
        self._worker = {"model": {"path": str(model), "dtype": "float32", "threads": 1}, "codec": codec}
        self._router = {"model": str(model), **router}
        self.children = [self._start_router(http=0, control=0)]
        try:
            ready = self.children[0].ready()
            self.api, self._control = Api(ready["http"]), ready["control"]
            self.prefill = self.node("prefill", "prefill-0")
            self.decode = [self.node("decode", f"decode-{i}") for i in range(num_decode)]
            until(lambda: self.api.nodes == {"prefill": 1, "decode": num_decode}, START_S, "every node is registered")
        except BaseException:
            self.stop()
            raise

    def node(self, kind: str, name: str, **settings: Any) -> Child:
        """Start one more node; it registers with the router."""
        child = role(self._folder, kind, name, {**self._worker, "router": self._control, "node_id": name, **settings})
        self.children.append(child)
        return child

    @property
    def router(self) -> Child:
        """The present router."""
        return self.children[0]

    def restart_router(self) -> None:
        """Wait for the end of the router and start another one at its addresses, where the nodes find it."""
        self.router.wait(KILL_S)
        self.router.kill()
        self.children[0] = self._start_router(http=_port(self.api.url), control=_port(self._control))
        self.router.ready()

    def _start_router(self, http: int, control: int) -> Child:
        ports = {"listen": {"port": http}, "control": {"port": control}}
        return role(self._folder, "router", "router", {**ports, **self._router})

    def stop(self) -> None:
        """Close the standard input of every process, then kill those that are left."""
        for child in self.children:
            if child.process.stdin:
                child.process.stdin.close()
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(KILL_S)
            child.kill()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def family(child: Child) -> list[psutil.Process]:
    """A process and all its descendants."""
    parent = psutil.Process(child.process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run, without zombies."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def check_weight(api: Api, most: float, tokens: int = 4096) -> None:
    """Check the counters after one prompt. Planes and headers together take at most the share `most` of FP16, and no
    token was computed twice."""
    rng = random.Random(tokens)
    before = api.metrics()
    api.complete([rng.randrange(3, 300) for _ in range(tokens)], max_tokens=2)
    after: dict[str, float] = {}

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0) for key, value in after.items() if key.partition("{")[0] == name)

    def counted() -> bool:
        """Whether the tokens are counted. The process of the router that is asked may not be the one that served."""
        after.update(api.metrics())
        return grown("hackkv_kv_transfer_tokens_total") >= tokens

    until(counted, START_S, "the tokens are counted")
    assert grown("hackkv_kv_transfer_tokens_total") == tokens
    fp16 = grown("hackkv_kv_transfer_fp16_bytes_total")
    assert fp16 == 2 * 2 * 2 * 2 * 128 * tokens  # K and V, 2 bytes, 2 layers, 2 KV heads, head_dim 128
    assert grown("hackkv_kv_transfer_bytes_total") / fp16 <= most
    assert after["hackkv_prompt_tokens_recomputed_total"] == 0
