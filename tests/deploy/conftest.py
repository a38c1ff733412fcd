"""The tools of Prometheus, which come from the system (Debian: `prometheus`)."""

from __future__ import annotations

import os
import shutil

import pytest


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        # CI installs the tools, so there a missing tool is an error and not a reason to skip.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    return path


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of promtool."""
    return _tool("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """Path of the Prometheus server."""
    return _tool("prometheus")
