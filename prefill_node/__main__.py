"""`python -m prefill_node --config FILE`: one prefill node, until it is told to stop (`node/shell.py`)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from faults.links import faulty_links
from faults.process import suffer
from faults.seams import FaultyPrefill, FaultySender
from hackkv.types import Role
from node.process import run_role
from node.shell import Ground, Hosted, Loaded, serve_node
from node.traced import traced_prefill
from prefill_node.config import PrefillConfig
from prefill_node.service import PrefillService
from transport.wires import open_senders


@asynccontextmanager
async def open_prefill(ground: Ground[PrefillConfig]) -> AsyncIterator[Hosted]:
    """A service that sends KV by the node's wires."""
    identity, config = ground.identity, ground.config
    faults = suffer(config.faults, identity.node_id)
    senders = open_senders(config.wire, replace(ground.site, links=faulty_links(faults)) if faults else ground.site)
    identity = replace(identity, wires=senders.wires)
    sender = FaultySender(senders, faults) if faults else senders
    service = PrefillService(identity, ground.worker, sender, ground.num_pages, config)
    face = traced_prefill(FaultyPrefill(service, faults) if faults else service, ground.spans)
    ground.server.add_prefill(face)
    try:
        yield Hosted(service, face)
    finally:
        await ground.server.close()
        await service.close()
        await sender.close()


serve = partial(serve_node, Role.PREFILL, open_prefill)


def main(argv: Sequence[str] | None = None, loaded: Loaded | None = None) -> int:
    """Run the command line; return the exit code. `loaded` is the model with which the process was forked."""
    return run_role("prefill", PrefillConfig, partial(serve, loaded=loaded), argv)


if __name__ == "__main__":
    sys.exit(main())
