"""A system in a process of its own: in its environment, with its threads, held to an instruction set if asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.peers.systems.child import Job, Result
from bench.peers.table import Entry
from hackkv.errors import HackkvError

ROOT: Final = Path(__file__).parents[2]
PEERS: Final = ROOT / ".venv-peers"
FORMS: Final = PEERS / "models"
"""Folder of the forms of the model that peers read."""
HOLD: Final = ROOT / "tools" / "hold_avx2.c"
NOT_INSTALLED: Final = "not installed: `make peers` says why"
CAUSE: Final = re.compile(r"error|assert", re.IGNORECASE)
CAUSE_CHARS: Final = 300


class Absent(HackkvError):
    """Raised if a system cannot be measured here; the message says why."""


def python_of(entry: Entry) -> Path:
    """The interpreter of a system's environment. Raises `Absent` if there is none."""
    if entry.ours:
        return Path(sys.executable)
    python = PEERS / entry.module / "bin" / "python"
    if not python.exists():
        raise Absent(NOT_INSTALLED)
    return python


def compile_hold(folder: Path) -> Path:
    """Compile the library that holds a process to AVX2 into `folder`. Raises `Absent` if it does not work here."""
    library = folder / "hold_avx2.so"
    try:
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HOLD], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Absent(f"{HOLD.name} does not compile: {error}") from None
    tried = subprocess.run([sys.executable, "-c", ""], env=environment(1, library), capture_output=True, text=True)
    if tried.returncode:
        raise Absent(tried.stderr.strip() or "a process held to AVX2 does not start")
    return library


def run(entry: Entry, job: Job, hold: Path | None, timeout_s: float) -> Result:
    """Do a job. Raises `Absent` with the last words of the process if it fails or takes longer than `timeout_s`."""
    if hold and not entry.held:
        raise Absent("compiled for this processor, so it cannot be held to another")
    python = python_of(entry)
    with TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command: list[str | Path] = [python, "-m", f"bench.peers.systems.{entry.module}", asked, answered]
        log = Path(folder) / "log"
        try:
            with log.open("w") as output:
                shown = environment(job.threads, hold)
                done = subprocess.run(
                    command, cwd=ROOT, env=shown, stdout=output, stderr=output, timeout=timeout_s, check=False
                )
        except subprocess.TimeoutExpired:
            raise Absent(f"stopped after {timeout_s:.0f} s") from None
        if done.returncode or not answered.exists():
            raise Absent(f"exit status {done.returncode}: {_cause(log.read_text(errors='replace'))}")
        return Result.of(json.loads(answered.read_text(encoding="utf-8")))


def _cause(log: str) -> str:
    """The last line of a log that names an error; without any, the last line."""
    lines = log.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if CAUSE.search(line)), lines[-1]).strip()[:CAUSE_CHARS]


def environment(threads: int, hold: Path | None) -> dict[str, str]:
    """Environment variables of a process. A system that is not told its threads takes those of OpenMP."""
    held = {"LD_PRELOAD": str(hold)} if hold else {}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **held}
