"""`python -m decode_node --config FILE`: load the model, open one port, register, serve until told to stop."""

from __future__ import annotations

import sys
from functools import partial
from uuid import uuid4

from decode_node.config import DecodeConfig
from decode_node.service import DecodeService
from faults.process import suffer
from faults.seams import FaultyDecode
from hackkv.model.worker import load_worker
from hackkv.process import Shutdown, announce, run_role
from hackkv.types import NodeIdentity
from transport.grpc_wire import GrpcListener
from transport.membership import stay_member
from transport.rpc_server import RpcServer
from transport.trust import load_trust


async def serve(config: DecodeConfig, shutdown: Shutdown) -> None:
    """Run one decode node until it is told to end; control calls and KV share its port."""
    trust = load_trust(config.internal, config.listen.host)
    worker = load_worker(config.model, config.codec)
    listen = config.listen
    async with RpcServer(listen.host, listen.port, advertise_host=listen.advertise_host, trust=trust) as server:
        num_pages = worker.pages_in(config.kv_bytes)
        address = await server.start()
        identity = NodeIdentity(config.node_id or f"decode@{address}", address, uuid4().hex)
        service = DecodeService(
            identity,
            worker,
            num_pages=num_pages,
            max_sequences=config.max_sequences,
            max_batch=config.max_batch,
            host_bytes=config.host_bytes,
            replay_tokens=config.replay_tokens,
            landing_s=config.landing_s,
        )
        listener = GrpcListener(server, frame_timeout_s=config.frame_timeout_s)
        await listener.serve(service.inbox.deliver)
        faults = suffer(config.faults, identity.node_id, service.pool)
        node = FaultyDecode(service, faults) if faults else service
        server.add_decode(node)
        announce(node=identity.node_id, address=address)
        try:
            async with shutdown.draining(partial(service.drain, config.drain_s)):
                await stay_member(config.router, node.describe, shutdown.stop, trust, news=service.draining)
        finally:
            await listener.close()
            await server.close()
            await service.close()


if __name__ == "__main__":
    sys.exit(run_role("decode", DecodeConfig, serve))
