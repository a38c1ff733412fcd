"""A cluster of one prefill and one decode node, real processes over loopback, and requests to it.

Its nodes compute (`started`), or nap for as long as a profile says (`napping`): then only what surrounds passes and
steps hangs on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.cluster import START_S, ClusterPlan, LocalCluster, running
from bench.cluster import describe, metrics, total, until
from bench.gate.agreement import JCT
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import HackkvError
from hackkv.model.shipped import find_model
from hackkv.timing import Stage
from hackkv.types import Role
from measure.serve.calls import Call
from measure.serve.client import Api, Client, Outcome
from measure.serve.load import run_load
from measure.serve.prompts import PromptMaker, find_tokenizer
from sim.spec import Spec

OWN_CACHE = {"prefix_cache": False}
"""Prompts are cut from one text; what they share by chance would be no property of the cluster."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is served: one compute thread for each node."""

    model: str
    """Empty: the model that ships along."""
    codec: str
    dtype: str = "bfloat16"

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return find_model(self.model, self.dtype).path

    @property
    def settings(self) -> tuple[ModelConfig, CodecConfig]:
        """As nodes are told."""
        model = ModelConfig(path=str(self.folder), dtype=self.dtype, threads=1)
        return model, CodecConfig(name=self.codec, allow_loss=True)


class Cluster:
    """A running cluster and its client; made by `started`."""

    def __init__(self, client: Client, prompts: PromptMaker, fields: dict[str, Any], pages: dict[Role, int]) -> None:
        self._client, self._prompts, self._fields = client, prompts, fields
        self._rng = np.random.default_rng(0)
        self.pages = pages
        """Of each node's pool."""

    def call(self, at_s: float, prompt_tokens: int, output_tokens: int) -> Call:
        """A request with a text of its own."""
        return Call(at_s, *self._prompts.text(prompt_tokens, self._rng), output_tokens)

    async def send(self, calls: Sequence[Call]) -> list[Outcome]:
        """Send every call at its time. Raises `HackkvError` if one fails: half a run says nothing."""
        outcomes, _ = await run_load(self._client, calls, self._fields, None, lambda: None, lambda _: None)
        for outcome in outcomes:
            if not outcome.ok or outcome.report is None:
                raise HackkvError(f"a request of the gate failed: {outcome.error or 'it has no stages'}")
        return outcomes


@contextlib.asynccontextmanager
async def started(subject: Subject) -> AsyncIterator[Cluster]:
    """Start router, prefill and decode node. All processes end on exit."""
    model, codec = subject.settings
    worker = {"model": model.model_dump(), "codec": codec.model_dump()}
    plan = ClusterPlan(_router(subject), worker, 1, 1, prefill=OWN_CACHE, decode=OWN_CACHE)
    async with running(plan, lambda _: None) as cluster:
        pages = {info.role: info.total_pages for info in await describe(cluster)}
        async with _client(cluster, subject, pages) as client:
            yield client


@contextlib.asynccontextmanager
async def napping(subject: Subject, spec: Spec, folder: Path) -> AsyncIterator[Cluster]:
    """Start a router, and the nodes of `spec` without weights (`sim.nodes`); `folder` takes the specification."""
    assert spec.prefill is not None
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
            pages = {Role.PREFILL: spec.prefill.pages, Role.DECODE: spec.decode.pages}
            async with _client(cluster, subject, pages) as client:
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
async def _client(cluster: LocalCluster, subject: Subject, pages: dict[Role, int]) -> AsyncIterator[Cluster]:
    client = Client(cluster.url, Api.COMPLETIONS)
    try:
        server = await client.server()
        fields = {"model": server.model, "temperature": 0, "ignore_eos": True, "return_stages": True}
        yield Cluster(client, PromptMaker(find_tokenizer(str(subject.folder))), fields, pages)
    finally:
        await client.close()


def stages_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Stage, and `JCT` as their sum, -> seconds of every request."""
    reports = [outcome.report["stages"] for outcome in outcomes if outcome.report is not None]
    seconds = {str(stage): [report[stage] for report in reports] for stage in map(str, Stage)}
    return {JCT: [sum(report[stage] for stage in map(str, Stage)) for report in reports], **seconds}
