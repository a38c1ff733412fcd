"""How a role becomes a process: command line, configuration, logging, signals, and one line that says it is ready.

    hackkv ROLE --config FILE [--set key=value ...] [--supervised]

SIGTERM asks a role to drain: to accept nothing new and to finish its requests. SIGINT, a second SIGTERM and the end of
standard input (`--supervised`) end it at once.

Exit codes: 0 after any of these, 1 when the role failed, 2 when its configuration or checkpoint is wrong. With 2, the
message is on standard error and no port was opened. The message is one line. If a codec is refused, its alternatives
follow, one line each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from hackkv.config import Frozen, RoleConfig, load
from hackkv.errors import ConfigError, HackkvError
from hackkv.heap import IdleTrim, keep_one_heap
from node.logs import log_to_stderr
from transport.closing import reap

log = logging.getLogger(__name__)


class Shutdown:
    """The events that tell a role to end: first `drain`, then `stop`, or `stop` at once. `stop` implies `drain`."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        """Set when the role must accept nothing new and finish its requests."""
        self.stop = asyncio.Event()
        """Set when the role must end now."""

    def ask(self) -> None:
        """Ask to drain. A second call orders to stop."""
        if self.drain.is_set():
            self.stop.set()
        self.drain.set()

    def order(self) -> None:
        """Order to stop."""
        self.drain.set()
        self.stop.set()

    @contextlib.asynccontextmanager
    async def draining(self, drain: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """While the body runs, answer a request to drain: call `drain`, and set `stop` when it has returned.

        The body should end with `stop`, which cancels a `drain` that still runs. Raises the error of `drain`.
        """
        task = asyncio.create_task(self._drain(drain))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def _drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        await self.drain.wait()
        try:
            await drain()
        finally:
            self.stop.set()


ConfigT = TypeVar("ConfigT", bound=RoleConfig)
Serve = Callable[[ConfigT, Shutdown], Awaitable[None]]
"""Runs a role until it is told to end."""


def run_role(role: str, config_class: type[ConfigT], serve: Serve[ConfigT], argv: Sequence[str] | None = None) -> int:
    """Run a role to its end and return the exit code."""
    arguments = _arguments(role, config_class, argv)
    keep_one_heap()
    try:
        overrides = dict(_override(text) for text in arguments.set)
        config = load(config_class, arguments.config, overrides)
        log_to_stderr(config.node_id or role, config.log_level, config.log_format)
        asyncio.run(_until_stopped(serve, config, supervised=arguments.supervised))
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return 2
    except HackkvError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return 1
    return 0


async def _until_stopped(serve: Serve[ConfigT], config: ConfigT, *, supervised: bool) -> None:
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, shutdown.ask)
    loop.add_signal_handler(signal.SIGINT, shutdown.order)

    def on_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            shutdown.order()

    if supervised:
        # The supervisor holds the other end of standard input. However it dies, standard input ends here.
        loop.add_reader(sys.stdin.fileno(), on_stdin)
    trimming = asyncio.create_task(IdleTrim().run())
    try:
        await serve(config, shutdown)
    finally:
        await reap(trimming)
        if supervised:
            loop.remove_reader(sys.stdin.fileno())


def _arguments(role: str, config_class: type[RoleConfig], argv: Sequence[str] | None) -> argparse.Namespace:
    sections = [one for one in config_class.__mro__ if issubclass(one, Frozen) and one is not Frozen]
    where = ", ".join(dict.fromkeys(filter(None, map(inspect.getsourcefile, sections))))
    parser = argparse.ArgumentParser(
        prog=f"hackkv {role}",
        description=f"Run one {role} process until it is told to stop.",
        epilog=f"The settings, with their meaning and defaults, are the fields of {where}.",
    )
    parser.add_argument("--config", type=Path, help="YAML file of this role")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting (a.b=1)")
    parser.add_argument("--supervised", action="store_true", help="stop when standard input ends")
    return parser.parse_args(argv)


def _override(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {text}: expected KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: {' '.join(str(error).split())}") from error
