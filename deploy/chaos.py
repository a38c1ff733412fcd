"""Chaos for a compose cluster: at intervals, a random node is killed and started again later, or paused for a while.

The program calls Docker's API on its socket and touches only nodes of its own compose project. Unlike after a crash,
Docker does not restart a container that was killed by this API. So this program starts it again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
from typing import Any

import httpx

SOCKET = "/var/run/docker.sock"
REQUEST_S = 60.0
ROLES = ("prefill-", "decode-")
PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"
STRIKES = (("kill", "start"), ("pause", "unpause"))
"""Pairs of the verb that takes a node away and the verb that brings it back."""
STOPS = (signal.SIGTERM, signal.SIGINT)
"""The signals that tell this program to stop."""


class Engine:
    """The few calls of Docker's API that chaos needs."""

    def __init__(self) -> None:
        transport = httpx.HTTPTransport(uds=SOCKET)
        self._client = httpx.Client(transport=transport, base_url="http://docker", timeout=REQUEST_S)

    def own_project(self) -> str:
        """The compose project of the container in which this program runs."""
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


def strike(engine: Engine, project: str, down_s: float) -> bool:
    """Take one random node away for `down_s` seconds, or until a signal says to stop; return whether one did.

    `STOPS` are blocked, so no signal can end the program before it has brought the node back.
    """
    nodes = engine.nodes(project)
    if not nodes:
        print("no node runs", flush=True)
        return False
    name = random.choice(sorted(nodes))
    verb, undo = random.choice(STRIKES)
    print(f"{verb} {name} for {down_s:g} s", flush=True)
    engine.do(verb, nodes[name])
    stop = told_to_stop(down_s)
    engine.do(undo, nodes[name])
    print(f"{undo} {name}", flush=True)
    return stop


def told_to_stop(within_s: float) -> bool:
    """Sleep for `within_s` seconds, or until a signal says to stop; return whether one did."""
    return signal.sigtimedwait(STOPS, within_s) is not None


def main() -> None:
    """Strike until a signal says to stop."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--every", type=float, default=30.0, metavar="S", help="seconds from one strike to the next")
    parser.add_argument("--down", type=float, default=5.0, metavar="S", help="seconds that a node stays away")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    engine = Engine()
    project = engine.own_project()
    while not told_to_stop(arguments.every) and not strike(engine, project, arguments.down):
        pass


if __name__ == "__main__":
    main()
