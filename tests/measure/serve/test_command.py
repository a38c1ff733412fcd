"""The whole command against the router's HTTP API on a real socket, with scripted nodes behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from hackkv.errors import NonFiniteError
from hackkv.packaged import SHIPPED
from hackkv.timing import Stage
from hackkv.tokenizer import Tokenizer
from measure.serve.__main__ import main
from router.api.app import build_app
from tests.router.conftest import make_served
from tests.router.scripted import Cluster, Point

KEY = "sesame"


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED)


@pytest.fixture(name="cluster")
async def make_cluster() -> Cluster:
    return await Cluster().join()


@contextlib.asynccontextmanager
async def serving(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[tuple[str, ...]]:
    """Run the API of a scripted cluster; yield the command-line arguments for it."""
    app = build_app(make_served(cluster, tokenizer), (KEY,))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    # The protocol is named for the reason that `router.front` gives.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield "--base-url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--tokenizer", str(SHIPPED)
        server.should_exit = True
        await task


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the key that the API asks for."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_a_run_sends_everything_and_writes_what_it_saw(
    cluster: Cluster, tokenizer: Tokenizer, backend: str, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "result.json"
    options = ("--backend", backend, "--num-prompts", "12", "--shape", "humaneval", "--scale", "0.2", "--seed", "3")
    load = ("--request-rate", "200", "--burstiness", "0.5", "--max-concurrency", "4", "--goodput", "e2el:60000")
    async with serving(cluster, tokenizer) as where:
        code = await asyncio.to_thread(main, [*where, *options, *load, "--save-detailed", "--out", str(out)])
    assert code == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["label"], result["model_id"]) == (12, 0, "hack", "tiny")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["kv"]["ratio"] < 1
    total = sum(result["stages"][stage]["mean"] for stage in Stage)
    assert 0 < total <= result["mean_e2el_ms"]
    assert [len(gaps) + 1 for gaps in result["itls"]] == result["output_lens"]
    cluster.assert_idle()


async def test_a_stream_that_breaks_off_is_a_failure_and_the_exit_code_says_so(
    cluster: Cluster, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node_id in ("d0", "d1"):
        cluster.fail(node_id, Point.TOKEN, *(NonFiniteError("K holds NaN") for _ in range(3)))
    out = tmp_path / "result.json"
    options = ("--input-len", "8", "--output-len", "8", "--num-prompts", "3", "--num-warmups", "0")
    async with serving(cluster, tokenizer) as where:
        code = await asyncio.to_thread(main, [*where, *options, "--out", str(out)])
    assert code == 1
    assert json.loads(out.read_text())["failed"] == 3
    assert "3 failed: K holds NaN" in capsys.readouterr().out


BAD = {
    "too long": (("--shape", "cocktail"), "--scale: the longest request has"),
    "no key": (("--api-key-file", "/nowhere"), "--api-key-file: /nowhere"),
    "refused by the server": (("--model", "gpt"), "the first request failed, so no more are sent: HTTP 404"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
async def test_what_cannot_work_is_said_before_the_load(
    cluster: Cluster, tokenizer: Tokenizer, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(cluster, tokenizer) as where:
        code = await asyncio.to_thread(main, [*where, "--scale", "0.2", *options])
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--goodput itl:5", "--goodput ttft:-1", "--request-rate 0", "--num-prompts 0"])
def test_bad_options_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(option.split())
    assert caught.value.code == 2
    assert option.split()[0] in capsys.readouterr().err
