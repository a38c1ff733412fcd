"""A cluster of one prefill and one decode node, real processes over loopback, and requests to it.

Its nodes compute (`started`), or sleep for as long as a profile says (`napping`). In the second case only the time
around passes and steps depends on the load of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil

from app.cluster import START_S, ClusterPlan, LocalCluster, running
from bench.cluster import describe, metrics, total, until
from bench.gate.agreement import JCT
from bench.gate.recording import Phase
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import HackkvError
from hackkv.model.config import read_spec as read_model
from hackkv.model.shipped import find_model
from hackkv.timing import Stage
from hackkv.types import Role
from measure.serve.calls import PlannedRequest
from measure.serve.client import Api, Client, RequestOutcome
from measure.serve.load import run_load
from measure.serve.prompts import PromptMaker, find_tokenizer
from sim.catalogue import ModelShape
from sim.spec import Spec

OWN_CACHE = {"prefix_cache": False}
"""Prompts are cut from one text. Prefixes that they share by chance would distort times, so no prefix is reused."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and codec that are served, with one compute thread for each node."""

    model: str
    """Empty for the shipped model."""
    codec: str
    dtype: str = "bfloat16"

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return find_model(self.model, self.dtype).path

    @property
    def shape(self) -> ModelShape:
        """The model's shape for the simulator."""
        model = read_model(self.folder)
        wide = model.hidden * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        parameters = model.num_layers * (wide + 3 * model.hidden * model.ffn) + model.vocab * model.hidden
        return ModelShape(
            layers=model.num_layers,
            hidden=model.hidden,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            ffn=model.ffn,
            vocab=model.vocab,
            parameters_b=parameters / 1e9,
        )

    @property
    def settings(self) -> tuple[ModelConfig, CodecConfig]:
        """The configuration of the nodes."""
        model = ModelConfig(path=str(self.folder), dtype=self.dtype, threads=1)
        return model, CodecConfig(name=self.codec, allow_loss=True)


_DIGITS = 6
"""Decimals of a second: microseconds."""
CLIENT, ROUTER = "client", "router"
"""The name of this process, and the name of the router's process."""


class Cluster:
    """A running cluster and its client; made by `started` or `napping`."""

    def __init__(
        self, client: Client, subject: Subject, server: str, pages: dict[Role, int], processes: dict[str, int]
    ) -> None:
        """`server` is the name of the served model; `processes` maps names to process ids."""
        self._client, self._prompts = client, PromptMaker(find_tokenizer(str(subject.folder)))
        self._fields = {"model": server, "temperature": 0, "ignore_eos": True, "return_stages": True}
        self._rng = np.random.default_rng(0)
        self._processes = {name: psutil.Process(number) for name, number in processes.items()}
        self.pages = pages
        """Pages of each node's pool."""

    def call(self, at_s: float, prompt_tokens: int, output_tokens: int) -> PlannedRequest:
        """A request with a text of its own."""
        return PlannedRequest(at_s, *self._prompts.text(prompt_tokens, self._rng), output_tokens)

    async def send(self, calls: Sequence[PlannedRequest]) -> list[RequestOutcome]:
        """Send every call at its time. Raises `HackkvError` if one fails, since part of a run is useless."""
        outcomes, _ = await run_load(self._client, calls, self._fields, None, lambda: None, lambda _: None)
        for outcome in outcomes:
            if not outcome.ok or outcome.report is None:
                raise HackkvError(f"a request of the gate failed: {outcome.error or 'it has no stages'}")
        return outcomes

    async def timed(self, *batches: Sequence[PlannedRequest]) -> Phase:
        """Send batches, one after another, and record their times. Raises `HackkvError` if a call fails."""
        before, began = self._cpu_s(), perf_counter()
        outcomes = [outcome for calls in batches for outcome in await self.send(calls)]
        wall_s, after = perf_counter() - began, self._cpu_s()
        return Phase(
            sizes=tuple((call.at_s, call.prompt_tokens, call.output_tokens) for calls in batches for call in calls),
            stages=stages_of(outcomes),
            wall_s=round(wall_s, _DIGITS),
            cpu_s={name: round(after[name] - spent, _DIGITS) for name, spent in before.items()},
        )

    def _cpu_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {CLIENT: process_time(), **{name: spent.user + spent.system for name, spent in times.items()}}


@contextlib.asynccontextmanager
async def started(subject: Subject) -> AsyncIterator[Cluster]:
    """Start router, prefill and decode node. All processes end on exit."""
    model, codec = subject.settings
    worker = {"model": model.model_dump(), "codec": codec.model_dump()}
    plan = ClusterPlan(_router(subject), worker, 1, 1, prefill=OWN_CACHE, decode=OWN_CACHE)
    async with running(plan, lambda _: None) as cluster:
        pages = {info.role: info.total_pages for info in await describe(cluster)}
        processes = {child.name: child.process.pid for child in cluster.children}
        async with _client(cluster, subject, pages, processes) as client:
            yield client


@contextlib.asynccontextmanager
async def napping(subject: Subject, spec: Spec, folder: Path) -> AsyncIterator[Cluster]:
    """Start a router and the nodes of `spec` without weights (`sim.nodes`). `folder` takes the specification's file."""
    file = folder / "naps.yaml"
    file.write_text(spec.model_dump_json(), encoding="utf-8")
    async with running(ClusterPlan(_router(subject), {}, 0, 0), lambda _: None) as cluster:
        given = {
            "spec": file,
            "router": cluster.children[0].ready["control"],
            "model": subject.folder,
            "internal.token_file": cluster.token_file,
            "log_level": "warning",
        }
        settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        command = (sys.executable, "-m", "sim.nodes", "--supervised", *settings)
        nodes = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL)
        try:
            await until(lambda: _has_nodes(cluster.url), START_S, "registration of the nodes")
            pages = {Role.PREFILL: spec.prefill[0].pages, Role.DECODE: spec.decode[0].pages}
            processes = {cluster.children[0].name: cluster.children[0].process.pid, "nodes": nodes.pid}
            async with _client(cluster, subject, pages, processes) as client:
                yield client
        finally:
            assert nodes.stdin is not None
            nodes.stdin.close()
            await nodes.wait()


def _router(subject: Subject) -> dict[str, Any]:
    return {"listen": {"port": 0}, "control": {"port": 0}, "model": str(subject.folder)}


async def _has_nodes(url: str) -> bool:
    return total(await metrics(url), "hackkv_nodes") == 2


@contextlib.asynccontextmanager
async def _client(
    cluster: LocalCluster, subject: Subject, pages: dict[Role, int], processes: dict[str, int]
) -> AsyncIterator[Cluster]:
    client = Client(cluster.url, Api.COMPLETIONS)
    try:
        server = await client.server()
        yield Cluster(client, subject, server.model, pages, processes)
    finally:
        await client.close()


def stages_of(outcomes: Sequence[RequestOutcome]) -> dict[str, tuple[float, ...]]:
    """Stage -> seconds of every request; `JCT` is the sum of the stages."""
    reports = [outcome.report["stages"] for outcome in outcomes if outcome.report is not None]
    seconds = {stage: tuple(round(report[stage], _DIGITS) for report in reports) for stage in map(str, Stage)}
    return {JCT: tuple(map(sum, zip(*seconds.values(), strict=True))), **seconds}
