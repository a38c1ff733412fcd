"""The input of a party: the public task, the addresses of the others, and its own secret, if it has one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.private.model import Shape
from bench.private.rules import Rules
from bench.private.session import Task


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one party."""

    rank: int
    addresses: tuple[str, ...]
    """`host:port` at which each party listens."""
    protocol: str
    fraction_bits: int
    limit_s: float
    """A party gives up after a silence of this many seconds."""
    task: Task
    prompt: tuple[int, ...] | None = None
    """The client's prompt; None for other parties."""
    weights: str | None = None
    """The owner's weights, an .npz file; None for other parties."""
    dealt: str | None = None
    """The client's precomputed KV, an .npz file, if the task deals it; else None."""


def write_job(job: Job, path: Path) -> None:
    """Write a job as JSON."""
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(path: Path) -> Job:
    """Read a job that `write_job` wrote."""
    told = json.loads(path.read_text(encoding="utf-8"))
    task = told["task"]
    task["shape"], task["rules"] = Shape(**task["shape"]), Rules(**task["rules"])
    task["sizes"] = {name: tuple(size) for name, size in task["sizes"].items()}
    task["variants"] = tuple(task["variants"])
    told["task"], told["addresses"] = Task(**task), tuple(told["addresses"])
    return Job(**told)
