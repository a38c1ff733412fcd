"""`hackkv serve` for operators: it stops cleanly, leaves nothing behind, and says why it cannot start."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from app.cluster import ClusterPlan, running
from hackkv.errors import NodeLost
from hackkv.model.tiny import Tiny
from tests.e2e.conftest import Start
from tests.e2e.processes import ENVIRONMENT, START_S, Api, Child, alive, family, role, until
from tests.model.gguf.writing import write_gguf

SMALL = ("--prefill", "1", "--decode", "1")
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
HOUR_S = 3600.0


@contextlib.contextmanager
def endless(url: str, decode: psutil.Process) -> Iterator[None]:
    """An answer that has begun and does not end by itself: its decode node is suspended."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=START_S) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        decode.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                decode.resume()


def named(name: str, processes: list[psutil.Process]) -> psutil.Process:
    """The one process of that name."""
    (found,) = (one for one in processes if one.name() == name)
    return found


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_orphan(checkpoint: Path, start: Start) -> None:
    """No process waits for an answer that does not end, or for the node that owes it."""
    child = start("serve", str(checkpoint), *SMALL, "--port", "0")
    url, processes = child.serving(), family(child)
    assert len(processes) == 6, "the command, the fork server, the router, its parser and two nodes"
    decode = named("decode-0", processes)
    with endless(url, decode):
        child.kill()
        until(lambda: alive(processes) == [decode], START_S, "every process has ended but the one that stands still")
    until(lambda: not alive(processes), START_S, "every process has ended")


@pytest.mark.slow
def test_ctrl_c_ends_a_node_that_stands_still(checkpoint: Path, start: Start) -> None:
    """The node is killed: it does not end by itself, and neither does the answer that it owes."""
    child = start("serve", str(checkpoint), *SMALL, "--port", "0")
    url, processes = child.serving(), family(child)
    with endless(url, named("decode-0", processes)):
        child.process.send_signal(signal.SIGINT)
        assert child.wait(START_S) == 130
        until(lambda: not alive(processes), START_S, "every process has ended")


async def test_a_cluster_stops_without_force_and_waits_for_no_answer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes would be killed after an hour, and nodes may drain as long. The third token of decode never comes."""
    monkeypatch.setattr("app.cluster.STOP_S", HOUR_S)
    faults = tmp_path / "plan.yaml"
    faults.write_text(yaml.safe_dump({"rules": [{"at": "decode.token", "do": "stall", "nth": 3}]}), encoding="utf-8")
    worker = {"model": {"path": str(checkpoint), "threads": 1}, "faults": str(faults), "drain_s": HOUR_S}
    plan = ClusterPlan({"listen": {"port": 0}, "control": {"port": 0}}, worker, num_prefill=1, num_decode=1)
    async with contextlib.AsyncExitStack() as outlives:
        async with running(plan, lambda _: None) as cluster:
            client = await outlives.enter_async_context(httpx.AsyncClient(base_url=cluster.url, timeout=START_S))
            answer = await outlives.enter_async_context(client.stream("POST", "/v1/completions", json=LONG))
            lines = answer.aiter_lines()
            assert "choices" in await anext(lines)
        assert [child.process.returncode for child in cluster.children] == [0, 0, 0], "none was killed"
        with contextlib.suppress(httpx.RemoteProtocolError):  # the router may be too slow to send the reason
            rest = [line async for line in lines if '"choices"' in line]
            assert len(rest) <= 2, "no more than the first token of prefill and two of decode"


def test_a_node_that_dies_is_started_again_and_requests_wait_for_it(checkpoint: Path, start: Start) -> None:
    child = start("serve", str(checkpoint), *SMALL, "--port", "0", "--dtype", "float32")
    api = Api(child.serving())
    expected = api.complete([5, 6, 7])["choices"][0]["token_ids"]
    for victim in family(child)[1:]:
        if victim.name() != "router":
            victim.kill()  # the fork server too
    answer = api.complete([5, 6, 7])  # both roles had nodes before, so the request waits
    assert answer["choices"][0]["token_ids"] == expected
    assert child.err.count("starting it again in 1 s") == 2


@pytest.mark.slow
def test_a_gguf_file_serves_what_its_checkpoint_serves(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "some-model.gguf", Tiny())
    answers = []
    for model in (file, file.with_suffix(".split")):
        child = start("serve", str(model), *SMALL, "--port", "0", "--dtype", "float32")
        answers.append(Api(child.serving()).complete([5, 6, 7])["choices"][0]["token_ids"])
        child.kill()
    assert answers[0] == answers[1]
    assert list((tmp_path / "cache" / "hackkv" / "models").glob("*-float32-v*"))


async def test_a_router_that_dies_while_the_nodes_start_is_a_clear_error(checkpoint: Path) -> None:
    def kill_the_router(_: str) -> None:
        (router,) = (child for child in psutil.Process().children() if child.name() == "router")
        router.kill()

    plan = ClusterPlan({"model": str(checkpoint), "listen": {"port": 0}, "control": {"port": 0}}, {}, 0, 0)
    with pytest.raises(NodeLost, match="the router was ready but does not answer"):
        async with running(plan, kill_the_router):
            pytest.fail("there is no router")


def unknown_architecture(folder: Path) -> str:
    """An unknown architecture."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    return "NoSuchModel"


def missing_tensor(folder: Path) -> str:
    """A file without one of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "model.norm.weight"


def truncated_file(folder: Path) -> str:
    """A download that broke off."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return "model.safetensors"


BROKEN: tuple[Callable[[Path], str], ...] = (unknown_architecture, missing_tensor, truncated_file)


@dataclass(frozen=True, slots=True)
class Refused:
    """A start that must fail: the process, the name that the error must contain, and the port that must stay closed."""

    child: Child
    fault: str
    port: int


@pytest.fixture(scope="module")
def refusals(checkpoint: Path, start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    """Every broken checkpoint, and a good one on a port that is taken; all started side by side."""
    folder = tmp_path_factory.mktemp("broken")
    started = {}
    for spoil in BROKEN:
        model = shutil.copytree(checkpoint, folder / spoil.__name__)
        fault, port = spoil(model), free_port()
        child = start("serve", str(model), *SMALL, "--port", str(port))
        started[spoil.__name__] = Refused(child, fault, port)
    return started


@pytest.mark.slow
@pytest.mark.parametrize("spoil", BROKEN)
def test_a_bad_checkpoint_is_one_clear_line_before_any_port_opens(
    refusals: dict[str, Refused], spoil: Callable[[Path], str]
) -> None:
    refused = refusals[spoil.__name__]
    assert refused.child.wait(START_S) == 2
    assert refused.child.out == ""
    lines = refused.child.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hackkv: ")
    assert refused.fault in lines[0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", refused.port))


def test_a_gpu_that_is_not_there_is_one_clear_line(
    checkpoint: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command asks for all GPUs, and none is visible, even to a torch with CUDA."""
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(ENVIRONMENT, "TRITON_INTERPRET", "0")
    child = start("serve", str(checkpoint), *SMALL, "--port", "0", "--device", "cuda")
    assert child.wait(START_S) == 2
    assert child.out == ""
    (line,) = child.err.strip().splitlines()
    assert line.startswith("hackkv: model.backend: triton: torch sees no CUDA device: ")


def test_a_port_in_use_is_a_clear_error_before_the_model_is_looked_for(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = start("serve", "/nowhere", *SMALL, "--port", str(port))
        assert child.wait(START_S) == 2
    (line,) = child.err.strip().splitlines()
    assert line == f"hackkv: listen: cannot bind 127.0.0.1:{port}: Address already in use"


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_a_codec_that_spoils_the_model_is_refused_once_and_by_a_lone_node_too(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's own settings spoil the answers of the shipped model."""
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    child = start("serve", "", *SMALL, "--port", "0", "--codec", "hack-paper")
    assert child.wait(START_S) == 2
    assert child.out == ""
    assert child.err.count("would spoil the answers of hackkv-small") == 1
    assert "\n  rot-k4v4 " in child.err
    assert "Traceback" not in child.err
    node = role(tmp_path, "prefill", "lone", {"codec": {"name": "hack-paper"}})
    assert node.wait(START_S) == 2
    assert node.err.startswith("prefill: codec.name: 'hack-paper' would spoil the answers of hackkv-small")
    node.kill()
    child = start("serve", "", *SMALL, "--port", "0", "--codec", "hack-paper,allow_loss")
    url = child.serving()
    nodes = httpx.get(f"{url}/version").json()["nodes"]
    assert {nodes[name]["codec_loss"]["kl"] > 0.15 for name in ("prefill-0", "decode-0")} == {True}
    assert Api(url).metrics()['hackkv_codec_kl{node="decode-0",role="decode"}'] > 0.15
    child.kill()
