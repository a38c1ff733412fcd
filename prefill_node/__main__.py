"""`python -m prefill_node --config FILE`: load the model, open one port, register, serve until told to stop."""

from __future__ import annotations

import sys
from functools import partial
from uuid import uuid4

from faults.process import suffer
from faults.seams import FaultyPrefill, FaultySender
from hackkv.model.worker import load_worker
from hackkv.process import Shutdown, announce, run_role
from hackkv.types import NodeIdentity
from prefill_node.config import PrefillConfig
from prefill_node.service import PrefillService
from prefill_node.shipment import Patience
from transport.grpc_wire import GrpcSender
from transport.membership import stay_member
from transport.rpc_server import RpcServer
from transport.trust import load_trust


async def serve(config: PrefillConfig, shutdown: Shutdown) -> None:
    """Run one prefill node until it is told to end."""
    trust = load_trust(config.internal, config.listen.host)
    worker = load_worker(config.model, config.codec)
    listen = config.listen
    async with RpcServer(listen.host, listen.port, advertise_host=listen.advertise_host, trust=trust) as server:
        num_pages = worker.pages_in(config.kv_bytes)
        address = await server.start()
        identity = NodeIdentity(config.node_id or f"prefill@{address}", address, uuid4().hex)
        faults = suffer(config.faults, identity.node_id)
        wire = GrpcSender(trust=trust)
        sender = FaultySender(wire, faults) if faults else wire
        service = PrefillService(
            identity,
            worker,
            sender,
            num_pages=num_pages,
            max_prompts=config.max_prompts,
            chunk_tokens=config.chunk_tokens,
            host_bytes=config.host_bytes,
            queue_tokens=config.queue_tokens,
            prefix_cache=config.prefix_cache,
            patience=Patience(config.unassigned_s, config.kept_s),
        )
        node = FaultyPrefill(service, faults) if faults else service
        server.add_prefill(node)
        announce(node=identity.node_id, address=address)
        try:
            async with shutdown.draining(partial(service.drain, config.drain_s)):
                await stay_member(config.router, node.describe, shutdown.stop, trust, news=service.draining)
        finally:
            await server.close()
            await service.close()
            await sender.close()


if __name__ == "__main__":
    sys.exit(run_role("prefill", PrefillConfig, serve))
