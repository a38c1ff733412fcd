"""Several processes behind one port, seen from outside: they are one router, and parts of it may die."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hackkv.errors import ConfigError
from node.listening import bind
from tests.router.processes import PATIENCE_S, nodes, router, series
from tests.router.scripted import Point

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "xyz", "max_tokens": 8, "stream": True}


def workers_of(process: Process) -> list[psutil.Process]:
    """The leader's children that serve, oldest first."""
    children = psutil.Process(process.pid).children()
    found = [child for child in children if "router.workers.process" in child.cmdline()]
    return sorted(found, key=lambda child: child.create_time())


def serves(worker: psutil.Process, client: socket.socket) -> bool:
    """Whether a connection belongs to that worker."""
    port = client.getsockname()[1]
    return any(one.raddr and one.raddr.port == port for one in worker.net_connections("tcp"))


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """A stream's events as they come, without `[DONE]`."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@asynccontextmanager
async def clients_of(url: str, workers: list[psutil.Process]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client of each worker, with one open connection. The system chooses workers by clients' ports."""
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        clients: dict[psutil.Process, httpx.AsyncClient] = {}
        while len(clients) < len(workers):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits))
            with suppress(httpx.TransportError):  # a worker that is about to be ready
                stream = (await client.get("/live")).extensions["network_stream"]
                taker = [one for one in workers if serves(one, stream.get_extra_info("socket"))]
                clients.update({one: client for one in taker if one not in clients})
        yield [clients[worker] for worker in workers]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """One series of `/metrics`; 0 if there is none."""
    return series((await client.get("/metrics")).text).get(name, 0.0)


async def until_metric(client: httpx.AsyncClient, name: str, wanted: float) -> None:
    """Poll until a metric has the wanted value. A worker hears of the others some milliseconds late."""
    async with asyncio.timeout(PATIENCE_S):
        while await metric(client, name) != wanted:  # noqa: ASYNC110  (the news comes over sockets)
            await asyncio.sleep(0.01)


async def until_served(client: httpx.AsyncClient, path: str, wanted: int) -> list[dict[str, Any]]:
    """Poll `/api/requests` until it lists `wanted` requests."""
    async with asyncio.timeout(PATIENCE_S):
        while len(told := (await client.get("/api/requests")).json()[path]) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    found: list[dict[str, Any]] = told
    return found


async def test_every_worker_shows_the_whole(checkpoint: Path) -> None:
    async with (
        router(checkpoint, "lease_ttl_s=3600", "workers=2") as (process, address),
        nodes(address["control"]) as (_, decode),
        clients_of(address["http"], workers_of(process)) as clients,
    ):
        gate = decode.script.gates[Point.TOKEN] = asyncio.Event()
        sent = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for client in clients]
        async with httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as another:
            held = 'hackkv_node_tokens{node="d0",role="decode"}'
            await until_metric(another, held, 2 * (3 + 8))
            assert len({one["id"] for one in await until_served(another, "live", 2)}) == 2
            assert await metric(another, "hackkv_router_inflight") == 2
        gate.set()
        for answer in sent:
            assert "[DONE]" in (await answer).text
        for client in clients:
            assert (await client.get("/ready")).json()["nodes"] == {"prefill": 1, "decode": 1}
            assert set((await client.get("/version")).json()["nodes"]) == {"p0", "d0"}
            ended = await until_served(client, "ended", 2)
            assert [one["seq"] for one in ended] == [1, 2]
            await until_metric(client, 'hackkv_requests_total{outcome="length"}', 2)
            await until_metric(client, 'hackkv_dispatched_tokens_total{role="decode"}', 2 * 3)
            await until_metric(client, held, 0)
        with pytest.raises(ConfigError, match="Address already in use"):
            bind("127.0.0.1", httpx.URL(address["http"]).port or 0)  # another router
        told = [(await client.get("/api/cluster")).json() for client in clients]
        assert told[0]["started"] == told[1]["started"]


@pytest.mark.slow
async def test_a_worker_that_dies_takes_only_its_own_requests_with_it(checkpoint: Path) -> None:
    async with (
        router(checkpoint, "lease_ttl_s=3600", "workers=2") as (process, address),
        nodes(address["control"]) as (prefill, decode),
        clients_of(address["http"], before := workers_of(process)) as (doomed, other),
    ):
        assert "[DONE]" in (await doomed.post(COMPLETIONS, json=BODY)).text
        gate = decode.script.gates[Point.TOKEN] = asyncio.Event()
        lost = asyncio.create_task(doomed.post(COMPLETIONS, json=BODY))
        kept = asyncio.create_task(other.post(COMPLETIONS, json=BODY))
        async with httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as third:
            await until_served(third, "live", 2)
        before[0].kill()
        with pytest.raises(httpx.TransportError):
            await lost
        async with asyncio.timeout(PATIENCE_S):
            while len(decode.open) + len(prefill.open) > 2:  # noqa: ASYNC110  (the news comes over sockets)
                await asyncio.sleep(0.01)
        gate.set()
        assert "[DONE]" in (await kept).text
        held = 'hackkv_node_tokens{node="d0",role="decode"}'
        await until_metric(other, held, 0)
        assert await metric(other, 'hackkv_requests_total{outcome="length"}') == 2, "what the dead one counted stays"
        assert await metric(other, "hackkv_router_inflight") == 0

        async with asyncio.timeout(PATIENCE_S):
            while len(after := workers_of(process)) < 2:  # noqa: ASYNC110  (another process starts it)
                await asyncio.sleep(0.05)
        (fresh,) = set(after) - set(before)
        async with clients_of(address["http"], [fresh, before[1]]) as (newcomer, _):
            assert "[DONE]" in (await newcomer.post(COMPLETIONS, json=BODY)).text
            assert len(await until_served(newcomer, "ended", 3)) == 3
            await until_metric(newcomer, 'hackkv_requests_total{outcome="length"}', 3)


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["terminated", "Ctrl-C"]
)
async def test_a_signal_to_all_ends_all_and_tells_who_is_being_served(checkpoint: Path, signum: signal.Signals) -> None:
    """A terminal or a service manager sends the signal to every process of the group."""
    async with (
        router(checkpoint, "lease_ttl_s=3600", "workers=2", "shutdown_grace_s=0.1") as (process, address),
        nodes(address["control"]) as (_, decode),
        clients_of(address["http"], workers := workers_of(process)) as clients,
        AsyncExitStack() as stack,
    ):
        decode.script.gates[Point.TOKEN] = asyncio.Event()
        streams = [await stack.enter_async_context(client.stream("POST", COMPLETIONS, json=BODY)) for client in clients]
        answers = [events(answer) for answer in streams]
        for answer in answers:
            assert "choices" in await anext(answer), "token 0, from the prefill node"
        for worker in workers:
            worker.send_signal(signum)
        process.send_signal(signum)
        for answer in answers:
            told = [event async for event in answer]
            assert told[-1]["error"]["message"] == "the router stopped before the request was complete"
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert not any(one.is_running() for one in workers)


@pytest.mark.slow
async def test_a_worker_that_cannot_start_again_is_tried_until_it_can(checkpoint: Path, tmp_path: Path) -> None:
    """Its checkpoint is gone for two starts. The leader keeps nothing of a start that failed."""
    model, aside = shutil.copytree(checkpoint, tmp_path / "model"), tmp_path / "aside"
    async with router(model, "workers=2") as (process, address):
        leader, before = psutil.Process(process.pid), workers_of(process)
        links = len(leader.net_connections("unix"))
        model.rename(aside)
        before[0].kill()
        async with asyncio.timeout(PATIENCE_S):
            tried = set[int]()
            while len(tried) < 2 or len(leader.net_connections("unix")) >= links:
                tried |= {one.pid for one in workers_of(process)} - {one.pid for one in before}
                await asyncio.sleep(0.05)
            aside.rename(model)
            async with httpx.AsyncClient(base_url=address["http"], timeout=PATIENCE_S) as client:
                while len(leader.net_connections("unix")) < links or len(workers_of(process)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert (await client.get("/live")).status_code == 200


@pytest.mark.slow
async def test_workers_do_not_outlive_their_leader(checkpoint: Path) -> None:
    async with router(checkpoint, "workers=2") as (process, _):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, family, PATIENCE_S)
        assert left == []
