"""A plan that a real process suffers: `faults: FILE` in a node's configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from faults.injector import Injector
from faults.plan import Action, FaultPlan
from hackkv.config import load
from hackkv.errors import ConfigError
from hackkv.pages import PagePool

log = logging.getLogger(__name__)


class ProcessHands:
    """Implements `Hands` for the process it runs in. Who restarts a killed process is its supervisor's affair."""

    def __init__(self, pool: PagePool | None) -> None:
        self._pool = pool

    def kill(self, node: str, back_after_s: float) -> None:
        """Die, here and now."""
        os.kill(os.getpid(), signal.SIGKILL)

    def abort(self, request: str) -> None:
        """No node can: `suffer` refuses such plans."""
        raise NotImplementedError

    def fill(self, node: str, seconds: float) -> None:
        """Take every free page for a while."""
        pool = self._pool
        grant = pool.take(pool.free_pages) if pool else None
        if pool and grant:
            asyncio.get_running_loop().call_later(seconds, pool.give_back, grant)


def suffer(plan: Path | None, node: str, pool: PagePool | None = None) -> Injector | None:
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
