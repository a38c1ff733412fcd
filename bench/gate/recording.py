"""The measurements of a live run, kept in a file, so that a simulator can be judged by them without the cluster."""

from __future__ import annotations

from pathlib import Path

from hackkv.config import Frozen, load
from hackkv.types import Role
from sim.catalogue import ModelShape
from sim.costs import Profile

Size = tuple[float, int, int]
"""A request: (seconds after the first moment, tokens of its prompt, tokens of its answer)."""


class Phase(Frozen):
    """A group of requests and their times."""

    sizes: tuple[Size, ...]
    stages: dict[str, tuple[float, ...]]
    """Stage (or `JCT`) -> seconds of every request."""
    wall_s: float
    cpu_s: dict[str, float]
    """Process -> seconds of processor time during the phase."""


class Idle(Frozen):
    """Measurements of a cluster that serves nothing else."""

    passes: tuple[Phase, ...]
    """Prompts one at a time, a phase for each row of the profile's passes."""
    steps: tuple[Phase, ...]
    """Batches of equal requests, a phase for each row of the profile's steps; the first has batches of one."""
    beside: Phase | None = None
    """Batches of one long answer and prompts that are computed beside its steps; the answer comes first. Older records
    have none."""


class Load(Frozen):
    """One load, sent several times."""

    share: float
    """Share of the rate that the slower role serves."""
    rate: float
    """Requests a second."""
    repeats: tuple[Phase, ...]


class Recording(Frozen):
    """The record of a live run."""

    command: str
    where: str
    """The machine and its load."""
    model: str
    """Empty for the shipped model."""
    codec: str
    naps: bool
    cores: float
    """Number of cores of the machine."""
    shape: ModelShape
    pages: dict[Role, int]
    """Pages of each node's pool."""
    alone: Profile
    idle: Idle
    loads: tuple[Load, ...]


def read_recording(path: Path) -> Recording:
    """Read a record. Raises `ConfigError` naming file and key."""
    return load(Recording, path)
