"""The dashboards are as generated, and a real Prometheus that scraped a real cluster answers every query."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hackkv.model.tiny import Tiny, write_tiny
from tests.e2e.processes import START_S, Api, Child, Fleet, until
from tests.e2e.test_serve import free_port
from tests.router.processes import NO_TLS
from tools.dashboards.__main__ import FOLDER, render
from tools.dashboards.boards import BOARDS

DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = "the-key-of-these-tests"
PROMPT = list(range(3, 103))
SETTLE_S = 30.0
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m"}
"""Variables of Grafana -> the values that it would insert."""


class Prometheus:
    """A server with the repository's own configuration, scraping one router often."""

    def __init__(self, binary: str, folder: Path, target: str) -> None:
        for rules in ("rules.yml", "alerts.yml"):
            (folder / rules).write_bytes((DEPLOY / "prometheus" / rules).read_bytes())
        (folder / "key").write_text(KEY, encoding="ascii")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        config["scrape_configs"][0]["authorization"]["credentials_file"] = str(folder / "key")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        command = (
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        )
        self.child = Child(folder, "prometheus", command)

    def ask(self, path: str, **query: str) -> Any:
        """GET one of the API's resources; return its data."""
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=query, timeout=START_S, verify=NO_TLS).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def healthy(self) -> bool:
        """Whether the server is up and its last scrape worked."""
        try:
            ready = httpx.get(f"{self._url}/-/ready", timeout=START_S, verify=NO_TLS).is_success
        except httpx.TransportError:
            ready = False
        if not ready:
            assert self.child.process.poll() is None, self.child.err
            return False
        targets = self.ask("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def has_data(self, expr: str) -> bool:
        """Whether a query has an answer that is a number."""
        samples = self.ask("query", query=expr)["result"]
        return any(math.isfinite(float(sample["value"][1])) for sample in samples)


@pytest.fixture(scope="module")
def monitored(prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A cluster that serves requests, and a Prometheus that scrapes it."""
    folder = tmp_path_factory.mktemp("monitored")
    model = write_tiny(folder / "tiny", Tiny(max_context=512))
    fleet = Fleet(folder / "cluster", model, {"name": "hack"}, {"api_keys": [KEY]}, num_decode=1)
    api = Api(fleet.api.url, {"Authorization": f"Bearer {KEY}"})
    server = Prometheus(prometheus, folder, api.url.removeprefix("http://"))
    try:
        until(server.healthy, START_S, "Prometheus scrapes the router")
        # A rate needs two different readings, so requests go on until all series have grown. A series with labels
        # appears with its first value, which no rate counts: that of the KV takes two requests.
        for name in ("vllm:e2e_request_latency_seconds_count", "hackkv_kv_transfer_fp16_bytes_total"):
            grows = f"rate({name}[1m]) > 0"
            until(lambda grows=grows: api.complete(PROMPT) and server.has_data(grows), SETTLE_S, f"{name} grows")  # type: ignore[misc]
        yield server
    finally:
        server.child.kill()
        fleet.stop()


def panels() -> list[tuple[str, str]]:
    """Name and query of every panel, read from the files that Grafana reads."""
    found = []
    for board in BOARDS:
        for panel in json.loads((FOLDER / f"{board.name}.json").read_text(encoding="utf-8"))["panels"]:
            found += [(f"{board.name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def test_the_files_are_what_the_code_generates() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{board.name}.json" for board in BOARDS}
    for board in BOARDS:
        assert (FOLDER / f"{board.name}.json").read_text(encoding="utf-8") == render(board), board.name


@pytest.mark.slow
def test_every_panel_has_data(monitored: Prometheus) -> None:
    for name, expr in panels():
        for variable, value in VARIABLES.items():
            expr = expr.replace(variable, value)
        until(lambda expr=expr: monitored.has_data(expr), SETTLE_S, f"{name}: {expr} has data")  # type: ignore[misc]


@pytest.mark.slow
def test_every_rule_records(monitored: Prometheus) -> None:
    rules = [rule for group in monitored.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > len(BOARDS)
    for rule in rules:
        assert rule["health"] == "ok", rule
        if rule["type"] == "recording":
            labels = ",".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
            series = f"{rule['name']}{{{labels}}}"
            until(lambda series=series: monitored.has_data(series), SETTLE_S, f"{series} is recorded")  # type: ignore[misc]
        else:
            assert rule["state"] == "inactive", rule
