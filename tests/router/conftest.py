"""A tiny byte-level tokenizer, and the HTTP API over a scripted cluster, in this process or in two others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2  # the HTTP client of the openai package
import pytest
from openai import AsyncOpenAI
from starlette.types import ASGIApp
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.defaults import SamplingDefaults
from router.api.served import ServedModel, serve_model
from router.config import RouterConfig
from router.watch.journal import Journal
from tests.e2e.processes import KILL_S, Child, role
from tests.router.processes import NO_TLS, PATIENCE_S, UNHURRIED, joined, series
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
    http2: httpx2.AsyncClient
    """The HTTP client for official API clients."""
    openai: AsyncOpenAI
    before: dict[str, float] = field(default_factory=dict)
    """The series of `/metrics` when the test began."""

    async def assert_idle(self) -> None:
        """See `Cluster.assert_idle`."""
        self.cluster.assert_idle()

    async def metrics(self) -> dict[str, float]:
        """The series of `/metrics`."""
        return series((await self.http.get("/metrics", headers=self.openai.auth_headers)).text)

    async def counted(self, name: str) -> float:
        """The increase of a counter of `/metrics` during this test. A missing counter fails the test."""
        return (await self.metrics())[name] - self.before.get(name, 0.0)


@dataclass(frozen=True)
class Inside(Api):
    """An API in this process, and its parts."""

    app: ASGIApp = field(kw_only=True)
    served: ServedModel = field(kw_only=True)


class Outside(Api):
    """An API of several other processes. Each learns with a delay what the others do."""

    async def assert_idle(self) -> None:
        """Wait until the cluster is idle and all processes know."""
        async with asyncio.timeout(PATIENCE_S):
            while self.cluster.open or await self._booked():  # noqa: ASYNC110  (the news comes over sockets)
                await asyncio.sleep(0.01)

    async def _booked(self) -> float:
        """The tokens and sequences that the answering process knows of."""
        told = await self.metrics()
        return sum(told[name] for name in told if name.startswith(("hackkv_node_tokens", "hackkv_router_inflight")))


def make_served(cluster: Cluster, tokenizer: Tokenizer, **settings: Any) -> ServedModel:
    """A model over a scripted cluster; `settings` are those of the router."""
    config = RouterConfig.model_validate(_given(tokenizer.folder, settings))
    return serve_model(
        config.model_name,
        tokenizer,
        cluster.fleet,
        SamplingDefaults(),
        config.deadlines,
        config.limits,
        strict=config.strict,
        journal=Journal(cluster.fleet, trace_link=config.trace_link),
    )


def make_app(served: ServedModel, **settings: Any) -> ASGIApp:
    """The HTTP API over `served`."""
    config = RouterConfig.model_validate(_given(served.tokenizer.folder, settings))
    max_body_bytes, body_s = config.limits.max_body_bytes, config.deadlines.body_s
    return build_app(served, config.keys(), max_body_bytes, body_s, cors_origins=config.cors_origins)


def _given(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A router's configuration."""
    return {"model": str(folder), "served_model_name": "tiny", "limits": LIMITS, **settings}


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the router of `api`. Tests that need some are parametrized with them."""
    return {}


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["inside", "workers"])
async def api(
    request: pytest.FixtureRequest, cluster: Cluster, tokenizer: Tokenizer, settings: dict[str, Any]
) -> AsyncIterator[Api]:
    """The HTTP API over `cluster`: in this process, or in two others over real sockets."""
    key: str = settings.get("api_keys", ["none"])[0]
    if request.param == 1:
        async with _inside(cluster, tokenizer, key, settings) as api:
            yield api
    else:
        address = request.getfixturevalue("two_workers")(settings)
        async with joined(cluster, address["control"]), outside(cluster, tokenizer, key, address["http"]) as other:
            yield other


INSIDE = pytest.mark.parametrize("api", [1], indirect=True, ids=["inside"])
"""For tests that inspect the process: they get `Inside`."""
ALSO_OUTSIDE = pytest.mark.parametrize("api", [1, 2], indirect=True, ids=["inside", "workers"])
"""For tests that run with two processes in `make test` too, not only in `make test-all`."""


@asynccontextmanager
async def _inside(cluster: Cluster, tokenizer: Tokenizer, key: str, settings: dict[str, Any]) -> AsyncIterator[Inside]:
    served = make_served(cluster, tokenizer, **settings)
    app = make_app(served, **settings)
    url = "http://router"
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http2,
    ):
        openai = AsyncOpenAI(api_key=key, base_url=f"{url}/v1", http_client=http2, max_retries=0)
        yield Inside(cluster, tokenizer, client, http2, openai, app=app, served=served)
    await served.prompts.parsers.close()
    await served.grammars.close()


@asynccontextmanager
async def outside(cluster: Cluster, tokenizer: Tokenizer, key: str, url: str) -> AsyncIterator[Outside]:
    """An API at `url`. Every request has a connection of its own, for which the system chooses a process."""
    fresh = {"max_keepalive_connections": 0}
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(**fresh), verify=NO_TLS) as client,
        httpx2.AsyncClient(timeout=PATIENCE_S, limits=httpx2.Limits(**fresh), verify=NO_TLS) as http2,
    ):
        openai = AsyncOpenAI(api_key=key, base_url=f"{url}/v1", http_client=http2, max_retries=0)
        # Wait until all processes know the nodes: for this answer the leader asks each process, after the news.
        assert (await client.get("/api/requests", headers=openai.auth_headers)).status_code == 200
        api = Outside(cluster, tokenizer, client, http2, openai)
        api.before.update(await api.metrics())
        yield api


TwoWorkers = Callable[[dict[str, Any]], dict[str, str]]
"""Settings of a router -> its addresses."""


@pytest.fixture(scope="session")
def two_workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    """Routers of two processes, without nodes. Tests with the same settings share one; there are few settings.

    Each test lets its own nodes join, under the same names.
    """
    running: dict[str, Child] = {}
    ports = {"listen": {"port": 0}, "control": {"port": 0}}
    always = {**ports, "workers": 2, "lease_ttl_s": 3600.0, "deadlines": UNHURRIED}

    def addresses(settings: dict[str, Any]) -> dict[str, str]:
        name = json.dumps(settings)
        if name not in running:
            given = _given(checkpoint, {**always, **settings})
            running[name] = role(tmp_path_factory.mktemp("router"), "router", "router", given)
        return running[name].ready()

    yield addresses
    for child in running.values():
        assert child.process.stdin is not None
        child.process.stdin.close()
    codes = [child.wait(2 * KILL_S) for child in running.values()]
    for child in running.values():
        child.kill()
    assert not any(codes), [child.err for child in running.values()]


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check the envelope of an error; return the error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
