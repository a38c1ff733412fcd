"""Runs programs that a model wrote, each in a process of its own with few rights and a short life.

The process has no network if the system lets us take it away, an empty folder, bounds on time, memory, files and
processes, no environment, and, if we are root, not our rights. Inside, an audit hook refuses what no answer needs:
deleting, starting programs, opening sockets, writing files. This stops accidents. Against attacks, use a machine of its
own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

CPU_SECONDS: Final = 5
WALL_SECONDS: Final = 30
MEMORY_BYTES: Final = 1 << 30
FILE_BYTES: Final = 1 << 20
NOBODY: Final = 65534
PASSED: Final = 73

_GUARD: Final = f"""\
import os, resource, sys
# Nobody may not be allowed to read the library, so what answers import is imported before.
import bisect, collections, copy, functools, hashlib, heapq, itertools, math, operator, random, re, string, typing
limits = dict(CPU={CPU_SECONDS}, AS={MEMORY_BYTES}, FSIZE={FILE_BYTES}, NOFILE=16, CORE=0)
for what, most in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
source = open("program.py", encoding="utf-8").read()
REFUSED = ("os.", "shutil.", "subprocess.", "socket.", "ctypes.", "signal.", "syslog.", "pty.")
HARMLESS = ("os.listdir", "os.scandir", "os.walk")
def refuse(event, arguments):
    if event.startswith(REFUSED) and event not in HARMLESS:
        raise PermissionError(event)
    if event == "open" and (arguments[1] or "r") not in ("r", "rb") and not isinstance(arguments[0], int):
        raise PermissionError("open for writing")
sys.addaudithook(refuse)
try:
    exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
except BaseException:
    os._exit(1)
os._exit({PASSED})
"""
"""Runs `program.py` of the current folder. The exit status is `PASSED` only if the program came to its end."""


def passes(program: str) -> bool:
    """Whether the program ends without an error, in time."""
    with TemporaryDirectory(prefix="hackkv-sandbox-") as name:
        folder = Path(name)
        folder.joinpath("program.py").write_text(program, encoding="utf-8", errors="replace")
        folder.chmod(0o755)
        command = [*_without_network(), sys.executable, "-I", "-B", "-c", _GUARD]
        nothing = subprocess.DEVNULL
        try:
            done = subprocess.run(
                command, cwd=folder, env={}, stdin=nothing, stdout=nothing, stderr=nothing, timeout=WALL_SECONDS
            )
        except subprocess.TimeoutExpired:  # `run` has killed the process, which could not start others
            return False
        return done.returncode == PASSED


@cache
def _without_network() -> tuple[str, ...]:
    """A command prefix that takes the network away; empty if the system does not allow it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    words = (unshare, "--net") if os.getuid() == 0 else (unshare, "--user", "--net")
    nothing = subprocess.DEVNULL
    allowed = subprocess.run([*words, "true"], stdin=nothing, stdout=nothing, stderr=nothing).returncode == 0
    return words if allowed else ()
