"""Modules that a start loads, state that a fork server passes on, and starts that Ctrl-C interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from app.forking import ForkServerClient, adopting
from app.interrupt import SIGNALS
from hackkv.packaged import SHIPPED
from tests.e2e.processes import ENVIRONMENT, START_S, Child, alive, family, hackkv, until

TIMEOUT_S = 240.0
HEAVY = ("torch", "transformers", "accelerate", "huggingface_hub", "scipy", "gguf")

IMPORTS = {
    "help": ("from app.cli import app; app()", (*HEAVY, "pydantic", "grpc", "numpy", "asyncio")),
    "the command `serve`": ("import app.serving", (*HEAVY, "pydantic", "grpc", "numpy")),
    "router": ("import router.__main__", (*HEAVY, "opentelemetry.sdk", "opentelemetry.exporter")),
    "nodes": (
        "import app.stock; app.stock.Stock().load({'model': {}, 'codec': {}})",
        (*(name for name in HEAVY if name != "torch"), "opentelemetry.sdk", "opentelemetry.exporter"),
    ),
}
"""Name of a case -> code, and modules that the code must not load."""


@pytest.mark.parametrize(("code", "unwanted"), IMPORTS.values(), ids=IMPORTS)
def test_nothing_is_loaded_that_is_not_needed(code: str, unwanted: tuple[str, ...]) -> None:
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    command = [sys.executable, "-c", f"{report}\n{code}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert not set(unwanted) & set(done.stderr.splitlines()[-1].split())


async def test_the_fork_server_has_one_thread_when_nodes_are_forked(tmp_path: Path) -> None:
    """The model is loaded before. A fork would lose threads, so there may be none."""
    with adopting():
        server = await ForkServerClient.start()
        try:
            await server.load({"path": str(SHIPPED)}, {})
            idle = await server.fork("prefill", "prefill-0")
            process = psutil.Process(idle.pid)
            assert process.name() == "prefill-0"
            assert process.ppid() == os.getpid(), "the child of who asked for it"
            forkserver = psutil.Process(server.pid)
            until(lambda: forkserver.num_threads() == process.num_threads() == 1, TIMEOUT_S, "one thread")
            idle.close_stdin()
            assert await idle.wait() == 0
            until(lambda: not code_of_torch(forkserver), TIMEOUT_S, "its code is unmapped when it rests")
            victim = await server.fork("decode", "decode-0")
            forkserver.kill()
            assert victim.returncode is None
            victim.kill()
            assert await victim.wait() == -signal.SIGKILL, "its exit code is known all the same"
            await idle.end()
            await victim.end()
        finally:
            await server.close()


def code_of_torch(process: psutil.Process) -> int:
    """Bytes of torch's code that a process has in memory."""
    areas = process.memory_maps(grouped=False)
    return sum(area.rss for area in areas if area.path.endswith("libtorch_cpu.so") and "x" in area.perms)


FORKS = """
import asyncio, json, os, sys
import app.serving
from app.forking import ForkServerClient, adopting, fork_server
from app.interrupt import Interrupt

async def main(begun):
    with adopting():
        server = ForkServerClient.of(begun)
        idle = await server.fork("router", "router")
        print(json.dumps([server.pid, idle.pid, os.getpid()]), flush=True)
        await asyncio.to_thread(sys.stdin.read)

Interrupt()
held = open(os.devnull)
os.set_inheritable(held.fileno(), True)
asyncio.run(main(fork_server()))
"""


def test_a_command_that_forks_its_fork_server_leaves_it_nothing_but_what_is_imported() -> None:
    """The fork server inherits no signal handler, file or thread of the command. Every fork ends with the command."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        try:
            assert command.stdout is not None
            forkserver, role, ours = (psutil.Process(pid) for pid in json.loads(command.stdout.readline()))
            assert (forkserver.name(), role.name()) == ("fork server", "router")
            for process in (forkserver, role):
                assert process.ppid() == ours.pid
                assert process.num_threads() == 1
                assert os.getsid(process.pid) == forkserver.pid, "Ctrl-C reaches the command alone"
                assert not signals(process.pid, "SigBlk") & set(SIGNALS)
                assert signals(process.pid, "SigCgt") & set(SIGNALS) == {signal.SIGINT}, "as Python has it"
            ignored = signals(ours.pid, "SigIgn") & {signal.SIGHUP}  # SIGHUP is ignored if the tests run under nohup
            assert signals(ours.pid, "SigCgt") >= set(SIGNALS) - ignored
            assert {os.readlink(f"/proc/{forkserver.pid}/fd/{fd}") for fd in range(2)} == {os.devnull}
            assert forkserver.num_fds() == 4, "the standard streams and its socket"
        finally:
            command.kill()
    until(lambda: not alive([forkserver, role]), TIMEOUT_S, "both have ended")


def signals(pid: int, kind: str) -> set[int]:
    """The signals of one of the masks that /proc/PID/status shows."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith(kind))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def named(child: Child) -> set[str]:
    """The names of a command's processes. Processes that end meanwhile are left out."""
    names = set()
    for process in family(child)[1:]:
        try:
            names.add(process.name())
        except psutil.Error:
            continue
    return names


def listens(child: Child) -> bool:
    """Whether the command has set its handlers. Python itself sets one for SIGINT at once, but none for SIGTERM."""
    return signal.SIGTERM in signals(child.process.pid, "SigCgt")


MILESTONES: dict[str, Callable[[Child], bool]] = {
    "it listens to signals": listens,
    "the fork server": lambda child: "fork server" in named(child),
    "the router is forked": lambda child: "router" in named(child),
    "the check is forked": lambda child: "check" in named(child),
    "the router is ready": lambda child: "router ready" in child.err,
    "a node is forked": lambda child: "prefill-0" in named(child),
    "a node is ready": lambda child: "prefill-0 ready" in child.err,
    "it serves": lambda child: "curl" in child.out,
}
"""Moments of a start, in order: name -> whether the start has reached it."""


@pytest.mark.slow
@pytest.mark.parametrize("reached", MILESTONES.values(), ids=MILESTONES)
def test_ctrl_c_at_any_moment_ends_all_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: Callable[[Child], bool]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path / "tmp"))
    child = hackkv(tmp_path, "hackkv", "serve", "--prefill", "1", "--decode", "1", "--port", "0", "--codec", "fp16")
    until(lambda: reached(child) or child.process.poll() is not None, START_S, "the moment has come")
    processes = family(child)
    child.process.send_signal(signal.SIGINT)
    assert child.wait(TIMEOUT_S) == 130
    lines = [line for line in child.err.splitlines() if " ready at " not in line and not line.startswith("serving ")]
    assert lines in (["all processes stopped"], ["hackkv: stopped"])
    until(lambda: not alive(processes), TIMEOUT_S, "every process has ended")
    assert not list((tmp_path / "tmp").iterdir())
