"""Fixtures for tests on real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hackkv.model.tiny import Tiny, write_tiny
from tests.e2e.processes import Child, hackkv

Start = Callable[..., Child]
"""Starts `hackkv ARGUMENTS...`. The process is killed after the module's tests."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of head_dim 128 that takes prompts of more than 4,096 tokens."""
    return write_tiny(tmp_path_factory.mktemp("e2e") / "tiny", Tiny(head_dim=128, max_context=4608))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """See `Start`."""
    children: list[Child] = []

    def begin(*arguments: str) -> Child:
        children.append(hackkv(tmp_path_factory.mktemp("command"), "hackkv", *arguments))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
