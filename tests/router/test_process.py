"""The router as a process: real sockets, real gRPC between it and scripted nodes, signals, configuration errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.prompts import SMALL
from router.config import MAX_WORKERS, LimitsConfig, RouterConfig
from tests.polling import POLL_S
from tests.router.processes import PATIENCE_S, WORKERS, nodes, router
from tests.router.scripted import Point, Script


async def held_inside(script: Script) -> float:
    """Stop the next request between prefill and its last tokens. Returns the seconds that it spent on the nodes at
    least."""
    arrived, token = script.reached[Point.PREFILL], script.reached[Point.TOKEN]
    gate = script.gates[Point.TOKEN] = asyncio.Event()
    await arrived.wait()
    began = time.perf_counter()
    await token.wait()
    inside_s = time.perf_counter() - began
    arrived.clear()
    token.clear()
    gate.set()
    return inside_s


def noting(times: dict[str, float]) -> Callable[[str, Any], Awaitable[None]]:
    """httpx's hook for `trace`, which notes the time of each event. A client waits from the first byte sent to the last
    byte received. The time that httpx takes to build a request and an answer depends on the machine."""

    async def note(event: str, _: Any) -> None:
        times[event] = time.perf_counter()

    return note


@pytest.mark.alone
@WORKERS
async def test_requests_go_through_real_sockets_and_the_stages_sum_to_the_clients_time(
    checkpoint: Path, workers: int
) -> None:
    async with (
        router(checkpoint, "lease_ttl_s=3600", f"workers={workers}") as (process, address),
        nodes(address["control"]) as (prefill, _),
        httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        body = {"prompt": "xyz", "max_tokens": 8, "return_stages": True}
        gaps = []
        for stream in (False, True) * 10:
            times: dict[str, float] = {}
            post = client.post("/v1/completions", json={**body, "stream": stream}, extensions={"trace": noting(times)})
            request = asyncio.create_task(post)
            inside_s = await held_inside(prefill.script)
            response = await request
            took_s = times["http11.receive_response_body.complete"] - times["http11.send_request_headers.started"]
            data: dict[str, Any] = response.json() if not stream else json.loads(response.text.split("\n\n")[-3][6:])
            stages_s = sum(data["hackkv"]["stages"].values())
            # The stages take no more than the client waited, and no less than it saw the nodes work.
            assert inside_s <= stages_s <= took_s
            gaps.append(took_s - stages_s - max(0.02 * took_s, 0.005))
        # The client shares its cores and its event loop with the nodes, so only the calmer requests can be judged.
        assert sorted(gaps)[len(gaps) // 4] <= 0
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.slow
@WORKERS
async def test_a_client_that_hangs_up_frees_the_nodes_and_a_signal_ends_what_is_left(
    checkpoint: Path, workers: int
) -> None:
    async with (
        router(checkpoint, "lease_ttl_s=3600", "shutdown_grace_s=1", f"workers={workers}") as (process, address),
        nodes(address["control"]) as (prefill, decode),
        httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as client,
    ):
        decode.script.gates[Point.TOKEN] = asyncio.Event()
        reached = decode.script.reached[Point.TOKEN]
        body = {"prompt": "xyz", "max_tokens": 8, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()  # an iterator without a reference is closed, and hangs up
            assert "data: " in await anext(lines)
            await reached.wait()
        async with asyncio.timeout(PATIENCE_S):
            while decode.open or prefill.open:  # noqa: ASYNC110  (the news comes over two sockets)
                await asyncio.sleep(0.01)
        reached.clear()
        async with client.stream("POST", "/v1/completions", json=body):
            await reached.wait()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        pytest.param(["model=/nowhere"], "/nowhere", marks=pytest.mark.slow),
        (["modle=x"], "modle"),
        pytest.param(["limits.max_body_bytes=-1"], "limits.max_body_bytes", marks=pytest.mark.slow),
        pytest.param(["api_key_file=/nowhere/key"], "/nowhere/key", marks=pytest.mark.slow),
        (["listen.port={taken}"], "listen"),
        (["control.port={taken}"], "cannot listen"),
        pytest.param(["nonsense"], "KEY=VALUE", marks=pytest.mark.slow),
        pytest.param(["workers=0"], "workers", marks=pytest.mark.slow),
        pytest.param(["workers=2", "model=/nowhere"], "/nowhere", marks=pytest.mark.slow),
        (["workers=2", "listen.port={taken}"], "listen"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(checkpoint: Path, settings: list[str], named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        base = [f"model={checkpoint}", "listen.port=0", "control.port=0"]
        arguments = [argument for item in (*base, *settings) for argument in ("--set", item.replace("{taken}", port))]
        done = subprocess.run(
            [sys.executable, "-m", "router", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert named in done.stderr.splitlines()[-1]


def test_keys_come_from_the_setting_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    config = RouterConfig(model=tmp_path, api_keys=("zero",), api_key_file=tmp_path / "keys")
    assert config.keys() == ("zero", "one", "two")
    assert config.model_name == tmp_path.name


@pytest.mark.parametrize("processes", [1, 2, 3, MAX_WORKERS])
def test_limits_are_divided_but_no_request_is_too_large_for_its_process(processes: int) -> None:
    whole = LimitsConfig(max_inflight=1000, max_waiting=100, max_connections=640, max_sequences=128)
    share = whole.shared_by(processes)
    assert share.max_inflight == max(-(-1000 // processes), 128)
    assert share.max_waiting == 100, "no more than all of them together, which is less than one request may bring"
    assert share.max_connections == -(-640 // processes)
    assert (share.max_sequences, share.max_body_bytes) == (whole.max_sequences, whole.max_body_bytes)


async def test_large_bodies_are_parsed_by_a_fork_of_the_router_that_holds_no_socket_of_it(checkpoint: Path) -> None:
    async with (
        router(checkpoint, "lease_ttl_s=3600") as (process, address),
        nodes(address["control"]),
        httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as client,
    ):
        parser = await parser_of(process.pid)
        assert parser_command(parser) == parser_command(process.pid)  # forked: nothing else was executed
        mine, its = sockets_of(process.pid), sockets_of(parser)
        assert its
        assert not its & mine
        body = {"prompt": "xyz", "max_tokens": 3, "user": "y" * SMALL}
        assert (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 3
        os.kill(parser, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await client.post("/v1/completions", json=body)).status_code != 200:
                pass  # jobs fail until the end of the parser is noticed
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert parser_command(await parser_of(process.pid)) != parser_command(process.pid)


async def parser_of(router: int) -> int:
    """The one child of a router that still runs."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := [pid for pid in children_of(router) if parser_command(pid)]) != 1:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    return found[0]


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parser_command(pid: int) -> bytes:
    """The command line of a process; empty when it is over."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def sockets_of(pid: int) -> set[str]:
    """The sockets that a process has open, beside its standard streams."""
    targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if int(entry.name) > 2]
    return {target for target in targets if target.startswith("socket:")}
