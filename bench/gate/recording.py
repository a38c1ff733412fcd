"""What a live run gave, kept in a file: a simulator can be judged by it again without the cluster."""

from __future__ import annotations

from pathlib import Path

from hackkv.config import Frozen, load
from hackkv.types import Role
from sim.catalogue import ModelShape
from sim.costs import Profile

Size = tuple[float, int, int]
"""A request: seconds after the first moment, tokens of its prompt, tokens of its answer."""


class Phase(Frozen):
    """Requests that were sent, and what they cost."""

    sizes: tuple[Size, ...]
    stages: dict[str, tuple[float, ...]]
    """Stage, and `JCT`, -> seconds of every request."""
    wall_s: float
    cpu_s: dict[str, float]
    """Process -> seconds that it computed meanwhile."""


class Idle(Frozen):
    """What was measured on a cluster that serves nothing else."""

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
    """Of what the slower role serves."""
    rate: float
    """Requests a second."""
    repeats: tuple[Phase, ...]


class Recording(Frozen):
    """A live run."""

    command: str
    where: str
    """The machine, and how busy it was."""
    model: str
    """Empty: the one that ships along."""
    codec: str
    naps: bool
    cores: float
    """Of the machine."""
    shape: ModelShape
    pages: dict[Role, int]
    """Of each node's pool."""
    alone: Profile
    idle: Idle
    loads: tuple[Load, ...]


def read_recording(path: Path) -> Recording:
    """Raises `ConfigError` naming file and key."""
    return load(Recording, path)
