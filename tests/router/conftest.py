"""A tiny byte-level tokenizer, and the HTTP API over a scripted cluster, in this process and as two others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2  # what the openai client speaks
import pytest
from openai import AsyncOpenAI
from starlette.types import ASGIApp
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.defaults import SamplingDefaults
from router.api.served import ServedModel, serve_model
from router.config import DeadlinesConfig, LimitsConfig
from router.watch.journal import Journal
from tests.e2e.processes import KILL_S, role
from tests.router.processes import PATIENCE_S, joined, series
from tests.router.scripted import Cluster

LIMITS = {
    "max_prompt_tokens": 400, "max_sequences": 32, "default_chat_tokens": 24, "max_inflight": 64, "max_failovers": 1,
    "max_body_bytes": 64 << 10,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer whose ids below 256 are the bytes themselves, in GPT-2's order."""
    folder = tmp_path_factory.mktemp("checkpoint")
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 8, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of `checkpoint`."""
    return Tokenizer(checkpoint)


@pytest.fixture
async def cluster() -> Cluster:
    """Two prefill and two decode nodes."""
    return await Cluster().join()


@dataclass(frozen=True)
class Api:
    """Clients of the HTTP API over a scripted cluster."""

    cluster: Cluster
    tokenizer: Tokenizer
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    before: dict[str, float] = field(default_factory=dict)
    """What `/metrics` said when the test began."""

    async def assert_idle(self) -> None:
        """As `Cluster.assert_idle`."""
        self.cluster.assert_idle()

    async def counted(self, name: str) -> float:
        """What a counter of `/metrics` has counted in this test. A counter that is not there fails the test."""
        return series((await self.http.get("/metrics")).text)[name] - self.before.get(name, 0.0)


@dataclass(frozen=True)
class Inside(Api):
    """An API in this process, and its parts."""

    app: ASGIApp = field(kw_only=True)
    served: ServedModel = field(kw_only=True)


class Outside(Api):
    """An API of other processes, each of which hears a little later what the others do."""

    async def assert_idle(self) -> None:
        """Once the news has come."""
        async with asyncio.timeout(PATIENCE_S):
            while self.cluster.open or await self._booked():  # noqa: ASYNC110  (the news comes over sockets)
                await asyncio.sleep(0.01)

    async def _booked(self) -> float:
        """Tokens and sequences, as whoever answers knows of."""
        told = series((await self.http.get("/metrics")).text)
        return sum(told[name] for name in told if name.startswith(("hackkv_node_tokens", "hackkv_router_inflight")))


def make_served(
    cluster: Cluster,
    tokenizer: Tokenizer,
    deadlines: DeadlinesConfig | None = None,
    *,
    strict: bool = False,
    trace_link: str = "",
) -> ServedModel:
    """A model over a scripted cluster."""
    return serve_model(
        "tiny",
        tokenizer,
        cluster.fleet,
        SamplingDefaults(),
        deadlines or DeadlinesConfig(),
        LimitsConfig(**LIMITS),
        strict=strict,
        journal=Journal(cluster.fleet, trace_link=trace_link),
    )


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["inside", "workers"])
async def api(request: pytest.FixtureRequest, cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """The HTTP API over `cluster`: in this process, and as two others over real sockets."""
    if request.param == 1:
        async with _inside(cluster, tokenizer) as api:
            yield api
    else:
        address = request.getfixturevalue("two_workers")
        async with joined(cluster, address["control"]), _outside(cluster, tokenizer, address["http"]) as other:
            yield other


INSIDE = pytest.mark.parametrize("api", [1], indirect=True, ids=["inside"])
"""For tests that look into the process: they get `Inside`."""
ALSO_OUTSIDE = pytest.mark.parametrize("api", [1, 2], indirect=True, ids=["inside", "workers"])
"""For tests that `make test` runs with two processes too, rather than `make test-all` alone."""


@asynccontextmanager
async def _inside(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[Inside]:
    served = make_served(cluster, tokenizer)
    app = build_app(served, max_body_bytes=LIMITS["max_body_bytes"])
    url = "http://router"
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http_client,
    ):
        openai = AsyncOpenAI(api_key="none", base_url=f"{url}/v1", http_client=http_client, max_retries=0)
        yield Inside(cluster, tokenizer, client, openai, app=app, served=served)


@asynccontextmanager
async def _outside(cluster: Cluster, tokenizer: Tokenizer, url: str) -> AsyncIterator[Outside]:
    """Every request has a connection of its own, for which the system chooses a process."""
    fresh = {"max_keepalive_connections": 0}
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(**fresh)) as client,
        httpx2.AsyncClient(timeout=PATIENCE_S, limits=httpx2.Limits(**fresh)) as http_client,
    ):
        await client.get("/api/requests")  # the leader asks all processes, which heard of the nodes before
        openai = AsyncOpenAI(api_key="none", base_url=f"{url}/v1", http_client=http_client, max_retries=0)
        yield Outside(cluster, tokenizer, client, openai, series((await client.get("/metrics")).text))


@pytest.fixture(scope="session")
def two_workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a router of two processes, without nodes. Each test lets its own join, under the same names."""
    ports = {"listen": {"port": 0}, "control": {"port": 0}}
    settings = {"model": str(checkpoint), "served_model_name": "tiny", "workers": 2, "lease_ttl_s": 3600.0}
    child = role(tmp_path_factory.mktemp("router"), "router", "router", {**ports, **settings, "limits": LIMITS})
    try:
        yield child.ready()
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.wait(KILL_S) == 0, child.err
    finally:
        child.kill()


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The envelope of an error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
