"""`python -m router --config FILE [--set key=value]`: load the tokenizer, open two ports, serve until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from node.process import Shutdown, run_role
from router.config import RouterConfig
from router.service import serve


async def run(config: RouterConfig, shutdown: Shutdown) -> None:
    """Run the router until it is told to end. Requests in flight get the same grace, whatever told it."""
    await serve(config, shutdown.drain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_role("router", RouterConfig, run, argv)


if __name__ == "__main__":
    sys.exit(main())
