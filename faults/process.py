"""Fault plans for real processes: `faults: FILE` in a node's configuration."""

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
        """Give the pages of a grant back."""
        ...


class ProcessHands:
    """Implements `Hands` for this process. A supervisor must restart a killed process."""

    def __init__(self, pool: Fillable | None) -> None:
        self._pool = pool

    def kill(self, node: str, back_after_s: float) -> None:
        """End this process by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def abort(self, request: str) -> None:
        """Raise an error: a node cannot make a client leave. `suffer` refuses such plans."""
        raise NotImplementedError

    def fill(self, node: str, seconds: float) -> None:
        """Take every free page for `seconds`."""
        pool = self._pool
        grant = pool.take(pool.free_pages) if pool else None
        if pool and grant:
            asyncio.get_running_loop().call_later(seconds, pool.give_back, grant)


def suffer(plan: Path | None, node: str, pool: Fillable | None = None) -> Injector | None:
    """The faults of this process; None without a plan. Raises `ConfigError` naming the file.

    `pool` is the page pool of a decode node.
    """
    if plan is None:
        return None
    faults = load(FaultPlan, plan)
    if any(rule.do is Action.ABORT for rule in faults.rules):
        raise ConfigError(f"{plan}: {Action.ABORT} is what a client does; a node cannot")
    log.warning("%s suffers the faults of %s", node, plan)
    return Injector(faults, node, ProcessHands(pool))
