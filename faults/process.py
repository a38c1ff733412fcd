"""A plan that a real process suffers: `faults: FILE` in a node's configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any, Protocol

from faults.injector import Injector
from faults.plan import Action, FaultPlan
from hackkv.config import load
from hackkv.errors import ConfigError

log = logging.getLogger(__name__)


class Fillable(Protocol):
    """The part of a page pool that a fault needs."""

    @property
    def free_pages(self) -> int:
        """Pages that no grant holds."""
        ...

    def take(self, num_pages: int) -> Any | None:
        """Take pages; returns a grant, or None if there is no room."""
        ...

    def give_back(self, grant: Any) -> None:
        """Return what a grant holds."""
        ...


class ProcessHands:
    """Implements `Hands` for the process that it runs in. Restarting a killed process is left to a supervisor."""

    def __init__(self, pool: Fillable | None) -> None:
        self._pool = pool

    def kill(self, node: str, back_after_s: float) -> None:
        """Die, here and now."""
        os.kill(os.getpid(), signal.SIGKILL)

    def abort(self, request: str) -> None:
        """Not possible in a node: `suffer` refuses such plans."""
        raise NotImplementedError

    def fill(self, node: str, seconds: float) -> None:
        """Take every free page for a while."""
        pool = self._pool
        grant = pool.take(pool.free_pages) if pool else None
        if pool and grant:
            asyncio.get_running_loop().call_later(seconds, pool.give_back, grant)


def suffer(plan: Path | None, node: str, pool: Fillable | None = None) -> Injector | None:
    """The faults of this process; None if it is to have none. Raises `ConfigError` naming the file.

    `pool` is a decode node's pages.
    """
    if plan is None:
        return None
    faults = load(FaultPlan, plan)
    if any(rule.do is Action.ABORT for rule in faults.rules):
        raise ConfigError(f"{plan}: {Action.ABORT} is what a client does; a node cannot")
    log.warning("%s suffers the faults of %s", node, plan)
    return Injector(faults, node, ProcessHands(pool))
