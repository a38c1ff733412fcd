"""Parties as processes on loopback, which are started, listened to and ended together."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from hackkv.errors import HackkvError

LOOPBACK: Final = "127.0.0.1"
STOP_S: Final = 60.0
"""Longest time until a killed process is gone."""


Said = tuple[int, dict[str, Any]]
"""(rank of a party, its message)"""


class PartyLost(HackkvError):
    """A party ended too early, or all were silent for too long."""


def addresses(count: int) -> tuple[str, ...]:
    """`host:port` on loopback for `count` parties; the ports are free."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return tuple(f"{LOOPBACK}:{each.getsockname()[1]}" for each in sockets)


def run_parties(commands: Sequence[Sequence[str]], limit_s: float, cwd: Path) -> Generator[Said, None, None]:
    """Run parties, and yield their messages (a JSON object a line) with their ranks until all have ended well.

    Raises `PartyLost` if one ends badly or all are silent for `limit_s`. No party outlives the generator.
    """
    heard: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    with ExitStack() as held:
        parties, listeners, errors = list[subprocess.Popen[str]](), list[threading.Thread](), list[Path]()
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        held.callback(_end, parties, listeners)
        for rank, command in enumerate(commands):
            errors.append(folder / f"{rank}.err")
            with errors[-1].open("w") as stderr:
                pipe = subprocess.PIPE
                parties.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, cwd=cwd))
            listeners.append(threading.Thread(target=_listen, args=(rank, parties[-1], heard), daemon=True))
            listeners[-1].start()
        running, last = len(parties), "they met"
        while running:
            try:
                rank, line = heard.get(timeout=limit_s)
            except Empty:
                raise PartyLost(f"the parties were silent for {limit_s:.0f} s, after {last}") from None
            if line is not None:
                said: dict[str, Any] = json.loads(line)
                last = f"{said['run']!r}" if "run" in said else last
                yield rank, said
                continue
            running -= 1
            if code := parties[rank].wait(STOP_S):
                raise PartyLost(f"party {rank} ended with exit code {code}, after {last}{_why(errors[rank])}")


def _listen(rank: int, party: subprocess.Popen[str], heard: SimpleQueue[tuple[int, str | None]]) -> None:
    assert party.stdout is not None
    for line in party.stdout:
        heard.put((rank, line))
    heard.put((rank, None))


def _why(errors: Path) -> str:
    """The last line that a party wrote to its standard error."""
    lines = errors.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1][:400]}" if lines else ""


def _end(parties: Sequence[subprocess.Popen[str]], listeners: Sequence[threading.Thread]) -> None:
    for party in parties:
        party.kill()
    for listener in listeners:
        listener.join(STOP_S)
    for party in parties:
        party.wait(STOP_S)
        for pipe in (party.stdin, party.stdout):
            if pipe is not None:
                pipe.close()
