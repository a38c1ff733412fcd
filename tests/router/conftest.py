"""A tiny byte-level tokenizer, and the HTTP API over a scripted cluster."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
from tests.router.scripted import Cluster

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


@dataclass(frozen=True, slots=True)
class Api:
    """The application, and clients that call it in this process."""

    app: ASGIApp
    cluster: Cluster
    served: ServedModel
    http: httpx.AsyncClient
    openai: AsyncOpenAI


def make_served(
    cluster: Cluster,
    tokenizer: Tokenizer,
    deadlines: DeadlinesConfig | None = None,
    *,
    strict: bool = False,
    trace_link: str = "",
) -> ServedModel:
    """A model over a scripted cluster."""
    limits = LimitsConfig(
        max_prompt_tokens=400, max_sequences=32, default_chat_tokens=24, max_inflight=64, max_failovers=1
    )
    defaults = SamplingDefaults(top_k=7)
    return serve_model(
        "tiny",
        tokenizer,
        cluster.fleet,
        defaults,
        deadlines or DeadlinesConfig(),
        limits,
        strict=strict,
        journal=Journal(cluster.fleet, trace_link=trace_link),
    )


@pytest.fixture
async def api(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """The HTTP API over `cluster`."""
    served = make_served(cluster, tokenizer)
    app = build_app(served, max_body_bytes=64 << 10)
    url = "http://router"
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as http_client,
    ):
        openai = AsyncOpenAI(api_key="none", base_url=f"{url}/v1", http_client=http_client, max_retries=0)
        yield Api(app, cluster, served, client, openai)


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The envelope of an error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
