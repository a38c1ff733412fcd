"""`docker compose up` on a real Docker engine: the cluster starts, serves, is monitored, and survives lost nodes.

`make compose-test` runs this file. Grafana is left out: it comes from an image registry, and these builds use none.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from deploy.tests.compose import ROOT, Compose, run
from tests.e2e.processes import Api, until
from tests.e2e.test_serve import free_port

pytestmark = pytest.mark.timeout(1800)  # the first test builds the images

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SERVICES = (*NODES, "router", "prometheus")
READY_S = 120.0
RECOVERED_S = 60.0
RECORDED_S = 60.0
PROMPT = "def read_lines(path):\n    " + "# one more line of a prompt that fills pages\n    " * 20
BURST_BITS = 8 * 65536
"""Bits that a link passes at once (deploy/link.sh)."""
BEFORE_TOKEN0 = ("router_queue", "prefill_queue", "prefill", "stream")
"""Stages that contain the time until token 0. `stream` also contains the time of tokens on their way to the client."""
LONG_PROMPT = "".join(f"value_{i} = {i * i}\n" for i in range(150))


class Cluster:
    """The compose project that these tests share."""

    def __init__(self, compose: Compose, http_port: int, prometheus_port: int) -> None:
        self.compose = compose
        self.url = f"http://127.0.0.1:{http_port}"
        self._prometheus = f"http://127.0.0.1:{prometheus_port}"
        key = compose("exec", "-T", "router", "cat", "/secrets/api_key").strip()
        self.api = Api(self.url, {"Authorization": f"Bearer {key}"})

    def whole(self) -> bool:
        """Whether every container is healthy and every node registered."""
        healthy = all(self.compose.health(service) == "healthy" for service in SERVICES)
        return healthy and self.api.nodes == {"prefill": 2, "decode": 2}

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """An instant query to Prometheus."""
        answer = httpx.get(f"{self._prometheus}/api/v1/query", params={"query": expr}, timeout=RECOVERED_S).json()
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Build and start the project and wait until it is healthy. At the end take it down, whatever happened."""
    http, prometheus = free_port(), free_port()
    settings = {
        "HACKKV_PORT": str(http),
        "HACKKV_PROMETHEUS_PORT": str(prometheus),
        "HACKKV_API_KEY_FILE": "/secrets/api_key",
    }
    compose = Compose(f"hackkv-test-{os.getpid()}", settings)
    run("deploy/offline.sh", env={"PYTHON": sys.executable})
    compose("--profile", "throttle", "build")
    try:
        compose("up", "-d")
        running = Cluster(compose, http, prometheus)
        took = until(running.whole, READY_S, "every container is healthy")
        print(f"ready {took:.0f} s after the containers were started")
        yield running
    except BaseException:
        print(compose("logs", "--tail", "20"))
        raise
    finally:
        compose("--profile", "throttle", "--profile", "chaos", "down", "--volumes", "--timeout", "5")


def test_it_serves(cluster: Cluster) -> None:
    assert cluster.api.complete(PROMPT)["usage"]["completion_tokens"] == 8
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=body, headers=cluster.api.headers, timeout=RECOVERED_S
    ) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2
    chat = {"messages": [{"role": "user", "content": "Repeat this text:\na list of strings"}], "max_tokens": 8, "n": 2}
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", json=chat, headers=cluster.api.headers, timeout=RECOVERED_S
    )
    assert [choice["message"]["role"] for choice in answer.json()["choices"]] == ["assistant"] * 2


def test_a_stranger_is_refused(cluster: Cluster) -> None:
    assert httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "x"}, timeout=RECOVERED_S).status_code == 401
    assert httpx.get(f"{cluster.url}/metrics", timeout=RECOVERED_S).status_code == 401


@pytest.mark.parametrize("service", SERVICES)
def test_containers_hold_no_privilege(cluster: Cluster, service: str) -> None:
    container = cluster.compose.container(service)
    host = container["HostConfig"]
    assert container["Config"]["User"] not in ("", "root", "0")
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["Memory"] > 0
    assert host["NanoCpus"] > 0
    assert host["PidsLimit"] > 0
    if service in NODES:
        assert list(container["NetworkSettings"]["Networks"]) == [f"{cluster.compose.project}_cluster"]
        assert not any((container["NetworkSettings"]["Ports"] or {}).values())


def test_prometheus_records_every_series(cluster: Cluster) -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
    names = {rule["record"] for group in groups for rule in group["rules"]}
    assert names
    served = "rate(vllm:e2e_request_latency_seconds_count[1m]) > 0"
    until(lambda: cluster.api.complete(PROMPT) and cluster.ask(served), RECORDED_S, "Prometheus sees requests")
    for name in sorted(names):
        until(lambda name=name: cluster.ask(name), RECORDED_S, f"{name} is recorded")  # type: ignore[misc]
    assert cluster.ask("sum by (role) (hackkv_nodes)")


@pytest.mark.parametrize("service", ["decode-1", "prefill-0"])
def test_a_node_that_crashes_under_load_is_replaced(cluster: Cluster, service: str) -> None:
    role = service.partition("-")[0]
    answers: list[dict[str, Any]] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers.append(cluster.api.complete(PROMPT, max_tokens=32))

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        until(lambda: answers, RECOVERED_S, "requests are served")
        cluster.compose.crash(service)
        until(lambda: cluster.api.nodes[role] == 1, RECOVERED_S, f"the router drops {service}")
        served = len(answers)
        until(lambda: len(answers) > served + len(clients), RECOVERED_S, "the others serve on")
        until(cluster.whole, RECOVERED_S, f"{service} is back")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert cluster.compose.container(service)["RestartCount"] == 1
    used, number = f"{role}_node", count()

    def is_chosen() -> bool:
        """Whether a prompt goes to the service. No node has its pages, so none attracts it."""
        return bool(cluster.api.complete(f"{next(number)} {PROMPT}")["hackkv"][used] == service)

    until(is_chosen, RECOVERED_S, f"{service} serves again")
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1, "greedy answers differ"


def test_a_throttled_link_takes_the_time_that_its_rate_asks_for(cluster: Cluster) -> None:
    bits_per_s, links = 2e6, ("link-0", "link-1")
    cluster.compose("--profile", "throttle", "up", "-d", "--no-deps", *links, HACKKV_LINK="2mbit")
    try:
        for link in links:
            until(lambda link=link: "2Mbit" in cluster.compose("logs", link), RECOVERED_S, f"{link} shapes")  # type: ignore[misc]
        # Twice as many requests as links: the bytes that one has in flight must not make others look dead.
        with ThreadPoolExecutor() as clients:
            answers = list(clients.map(cluster.api.complete, [LONG_PROMPT] * 2 * len(links)))
        # By now the pages are in the prefill nodes' pools. Little is left to compute: most of the time is the link's.
        answer = cluster.api.complete(LONG_PROMPT)
    finally:
        cluster.compose("--profile", "throttle", "rm", "--stop", "--force", *links)
    assert len({each["choices"][0]["text"] for each in (*answers, answer)}) == 1
    report = answer["hackkv"]
    sent_bits = 8 * (sum(report["kv"]["bytes_by_plane"].values()) + report["kv"]["header_bytes"])
    carried_after_s = (sent_bits - BURST_BITS) / bits_per_s
    assert report["total_s"] > carried_after_s
    # However long prefill takes, a link carries no more until token 0 than its rate allows. The rest is transfer.
    before_token0_s = sum(report["stages"][stage] for stage in BEFORE_TOKEN0)
    print(f"link {carried_after_s:.1f} s, until token 0 {before_token0_s:.1f} s, {report}")
    assert report["stages"]["transfer"] > carried_after_s - before_token0_s


def test_chaos_strikes_and_the_cluster_heals(cluster: Cluster) -> None:
    chaos = {"HACKKV_CHAOS_EVERY_S": "1", "HACKKV_CHAOS_DOWN_S": "2"}
    cluster.compose("--profile", "chaos", "up", "-d", "--no-deps", "chaos", **chaos)
    try:
        until(lambda: "start " in cluster.compose("logs", "chaos"), RECOVERED_S, "chaos killed and started a node")
    finally:
        cluster.compose("--profile", "chaos", "rm", "--stop", "--force", "chaos")
    until(cluster.whole, RECOVERED_S, "every node is back")
    assert cluster.api.complete(PROMPT)["usage"]["completion_tokens"] == 8


def test_with_mutual_tls_every_health_check_passes(cluster: Cluster, tmp_path: Path) -> None:
    """The last test: from here on the cluster runs with certificates."""
    folder = tls_config(tmp_path)
    cluster.compose("up", "-d", HACKKV_CONFIG=str(folder))
    assert "tls:" in cluster.compose("exec", "-T", "decode-0", "cat", "/etc/hackkv/decode.yaml")
    until(cluster.whole, READY_S, "every container is healthy with TLS")
    assert cluster.api.complete(PROMPT)["usage"]["completion_tokens"] == 8


def tls_config(folder: Path) -> Path:
    """Write deploy/config with certificates beside the files, as docs/deploy.md describes."""
    authority = trustme.CA()
    issued = authority.issue_cert("hackkv")
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    tls = {name: f"/etc/hackkv/{name}.pem" for name in ("authority", "certificate", "key")}
    for path in (ROOT / "deploy/config").iterdir():
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        config["internal"]["tls"] = {**tls, "server_name": "hackkv"}
        (folder / path.name).write_text(yaml.safe_dump(config), encoding="utf-8")
    folder.chmod(0o755)  # only their owner can read pytest's folders, and containers run as another user
    return folder
