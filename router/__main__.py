"""`python -m router --config FILE [--set key=value]`: load the tokenizer, open two ports, serve until told to stop."""

from __future__ import annotations

import sys

from node.process import Shutdown, run_role
from router.config import RouterConfig
from router.service import serve


async def run(config: RouterConfig, shutdown: Shutdown) -> None:
    """Run the router until it is told to end. Requests in flight get the same grace, whatever told it."""
    await serve(config, shutdown.drain)


if __name__ == "__main__":
    sys.exit(run_role("router", RouterConfig, run))
