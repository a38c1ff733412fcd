"""The circumstances of a run: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hackkv", "kernels", "transport", "router", "prefill_node", "decode_node", "bench")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the versions that matter."""

    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    backend: str
    """The kernels that ran."""
    jobs: int
    """Threads that worked side by side, each with one compute thread."""


def this_machine(backend: str, jobs: int) -> Machine:
    """The machine that runs this process."""
    system = f"{platform.system()} {platform.release()}"
    return Machine(_cpu(), os.cpu_count() or 1, system, platform.python_version(), torch.__version__, backend, jobs)


def _cpu() -> str:
    """The processor's name, from /proc on Linux, from `platform` elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The checked-out commit, marked if tracked files of `PACKAGES` differ; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *PACKAGES)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, with local changes" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
