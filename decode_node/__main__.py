"""`python -m decode_node --config FILE`: one decode node, until it is told to stop (`node/shell.py`)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from decode_node.config import DecodeConfig
from decode_node.service import DecodeService
from faults.links import faulty_links
from faults.process import suffer
from faults.seams import FaultyDecode, lending
from hackkv.types import Role
from node.process import run_role
from node.shell import Ground, Hosted, Loaded, serve_node
from node.traced import traced_decode
from transport.wires import Listeners


@asynccontextmanager
async def open_decode(ground: Ground[DecodeConfig]) -> AsyncIterator[Hosted]:
    """A service that takes KV from the node's wires. The wire `grpc` shares the port of control calls."""
    identity, config = ground.identity, ground.config
    service = DecodeService(identity, ground.worker, ground.num_pages, config)
    site = replace(ground.site, frame_timeout_s=config.frame_timeout_s)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(service.close)
        stack.push_async_callback(ground.server.close)
        await service.record()
        faults = suffer(config.faults, identity.node_id, service.pool)
        listeners = Listeners(config.wire, replace(site, links=faulty_links(faults)) if faults else site)
        stack.push_async_callback(listeners.close)
        await service.listen(listeners, lending(service.inbox.lend, faults) if faults else None)
        face = traced_decode(FaultyDecode(service, faults) if faults else service, ground.spans)
        ground.server.add_decode(face)
        yield Hosted(service, face)


serve = partial(serve_node, Role.DECODE, open_decode)


def main(argv: Sequence[str] | None = None, loaded: Loaded | None = None) -> int:
    """Run the command line; return the exit code. `loaded` is the model with which the process was forked."""
    return run_role("decode", DecodeConfig, partial(serve, loaded=loaded), argv)


if __name__ == "__main__":
    sys.exit(main())
