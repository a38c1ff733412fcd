"""Tiny random checkpoints, written once per test run and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hackkv.model.tiny import Tiny, write_tiny

MakeTiny = Callable[[Tiny], Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: matrices this small gain nothing from more, which wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """Return a function that gives the folder of a checkpoint of a shape. Tests must not write to it."""
    made: dict[str, Path] = {}

    def make(tiny: Tiny) -> Path:
        if repr(tiny) not in made:
            made[repr(tiny)] = write_tiny(tmp_path_factory.mktemp("tiny"), tiny)
        return made[repr(tiny)]

    return make


@pytest.fixture
def own_tiny(tmp_path: Path) -> Path:
    """A Llama checkpoint that the test may spoil."""
    return write_tiny(tmp_path / "own", Tiny(layers=1, hidden=64, heads=2, kv_heads=1, ffn=64))
