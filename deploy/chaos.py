"""Chaos for a compose cluster: now and then a random node is killed, and started again later, or is paused for a while.

It speaks Docker's API on its socket and touches only nodes of its own compose project. A kill by this API, unlike a
crash, tells Docker not to restart the container, so it is started again here.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import time
from typing import Any

import httpx

SOCKET = "/var/run/docker.sock"
REQUEST_S = 60.0
ROLES = ("prefill-", "decode-")
PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"
STRIKES = (("kill", "start"), ("pause", "unpause"))
"""What is done to a node, and what undoes it."""


class Engine:
    """The few calls of Docker's API that chaos needs."""

    def __init__(self) -> None:
        transport = httpx.HTTPTransport(uds=SOCKET)
        self._client = httpx.Client(transport=transport, base_url="http://docker", timeout=REQUEST_S)

    def own_project(self) -> str:
        """The compose project of the container that this runs in."""
        project: str = self._get(f"/containers/{socket.gethostname()}/json")["Config"]["Labels"][PROJECT]
        return project

    def nodes(self, project: str) -> dict[str, str]:
        """Service -> container of every running node."""
        filters = json.dumps({"label": [f"{PROJECT}={project}"], "status": ["running"]})
        running = {one["Labels"][SERVICE]: one["Id"] for one in self._get("/containers/json", filters=filters)}
        return {name: container for name, container in running.items() if name.startswith(ROLES)}

    def do(self, verb: str, container: str) -> None:
        """Kill, start, pause or unpause a container."""
        self._client.post(f"/containers/{container}/{verb}").raise_for_status()

    def _get(self, path: str, **query: str) -> Any:
        return self._client.get(path, params=query).raise_for_status().json()


def strike(engine: Engine, project: str, down_s: float) -> None:
    """Take one random node away for `down_s` seconds; it comes back whatever interrupts us."""
    nodes = engine.nodes(project)
    if not nodes:
        print("no node runs", flush=True)
        return
    name = random.choice(sorted(nodes))
    verb, undo = random.choice(STRIKES)
    print(f"{verb} {name} for {down_s:g} s", flush=True)
    engine.do(verb, nodes[name])
    try:
        time.sleep(down_s)
    finally:
        engine.do(undo, nodes[name])
        print(f"{undo} {name}", flush=True)


def main() -> None:
    """Strike until told to stop."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--every", type=float, default=30.0, metavar="S", help="seconds from one strike to the next")
    parser.add_argument("--down", type=float, default=5.0, metavar="S", help="seconds that a node stays away")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = Engine()
    project = engine.own_project()
    while True:
        time.sleep(arguments.every)
        strike(engine, project, arguments.down)


if __name__ == "__main__":
    main()
