"""A cluster of one prefill and one decode node, real processes over loopback, and requests to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.cluster import ClusterPlan, running
from bench.cluster import describe
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
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model.path}
    plan = ClusterPlan(router, worker, 1, 1, prefill=OWN_CACHE, decode=OWN_CACHE)
    async with running(plan, lambda _: None) as cluster:
        client = Client(cluster.url, Api.COMPLETIONS)
        try:
            server = await client.server()
            fields = {"model": server.model, "temperature": 0, "ignore_eos": True, "return_stages": True}
            pages = {info.role: info.total_pages for info in await describe(cluster)}
            yield Cluster(client, PromptMaker(find_tokenizer(model.path)), fields, pages)
        finally:
            await client.close()


def stages_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Stage, and `JCT` as their sum, -> seconds of every request."""
    reports = [outcome.report["stages"] for outcome in outcomes if outcome.report is not None]
    seconds = {str(stage): [report[stage] for report in reports] for stage in map(str, Stage)}
    return {JCT: [sum(report[stage] for stage in map(str, Stage)) for report in reports], **seconds}
