"""The health service, asked as any gRPC prober would ask."""

from __future__ import annotations

import asyncio
import socket

from transport.health import main, probe
from transport.rpc_server import RpcServer
from transport.trust import Trust


async def test_a_server_is_healthy_without_a_token() -> None:
    server = RpcServer("127.0.0.1", 0, trust=Trust("a-token-that-the-prober-lacks"))
    address = await server.start()
    try:
        assert await asyncio.to_thread(probe, address) == "SERVING"
        assert await asyncio.to_thread(main, [address]) == 0
    finally:
        await server.close()
    assert await asyncio.to_thread(main, [address]) == 1


async def test_a_port_where_nobody_answers_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert (await asyncio.to_thread(probe, address, 0.2)).startswith(address)
    assert main([]) == 2
