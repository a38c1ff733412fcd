"""Drives docker-compose.yml for tests, with the installed Compose and a project and ports of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = ("docker-compose.yml", "deploy/offline.yml")
COMMAND_S = 1500.0


def _command() -> tuple[str, ...]:
    """Compose v2 if Docker has it, else docker-compose."""
    v2 = subprocess.run(("docker", "compose", "version"), capture_output=True, check=False).returncode == 0
    if not v2 and shutil.which("docker-compose") is None:
        raise RuntimeError("neither `docker compose` nor `docker-compose` is installed")
    return ("docker", "compose") if v2 else ("docker-compose",)


def run(*command: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_S) -> str:
    """Run a command in the repository; return its standard output. Fails with everything that it printed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Compose:
    """One project of docker-compose.yml, built without an image registry."""

    def __init__(self, project: str, settings: Mapping[str, str]) -> None:
        files = tuple(argument for file in FILES for argument in ("-f", file))
        self._command = (*_command(), *files, "-p", project)
        self._settings = dict(settings)
        self.project = project

    def __call__(self, *arguments: str, **settings: str) -> str:
        """Run Compose with additional settings; return its output."""
        return run(*self._command, *arguments, env={**self._settings, **settings})

    def container(self, service: str) -> dict[str, Any]:
        """Docker's description of a service's container."""
        found = run("docker", "ps", "-aq", *self._filter(), "-f", f"label=com.docker.compose.service={service}").split()
        assert len(found) == 1, f"{service}: {found}"
        inspected: list[dict[str, Any]] = json.loads(run("docker", "inspect", found[0]))
        return inspected[0]

    def services(self) -> set[str]:
        """The services whose containers run."""
        label = '{{.Label "com.docker.compose.service"}}'
        return set(run("docker", "ps", *self._filter(), "--format", label).split())

    def health(self, service: str) -> str:
        """The state of a service's health check: "healthy", "starting", ..."""
        status: str = self.container(service)["State"]["Health"]["Status"]
        return status

    def crash(self, service: str) -> None:
        """End a service's main process as a fault would. `docker kill` would forbid a restart."""
        os.kill(self.container(service)["State"]["Pid"], signal.SIGKILL)

    def _filter(self) -> tuple[str, str]:
        return ("-f", f"label=com.docker.compose.project={self.project}")
