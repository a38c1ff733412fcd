"""`Check` of the standard gRPC health service (grpc.health.v1), so that any prober works, and a prober of our own.

    python -m transport.health HOST:PORT                        # exit code 0 if the process there serves
    python -m transport.health HOST:PORT --config prefill.yaml  # through the mutual TLS that its configuration asks for

Healthy means that the process answers. The router's `/ready` says whether a node takes part in a fleet. Probers need no
token, because the answer reveals nothing. With mutual TLS they need a certificate of the cluster's authority.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hackkv.config import Frozen, InternalConfig, load
from hackkv.errors import ConfigError
from transport.status import Context
from transport.trust import EVERYBODY, Trust, load_trust

PROBE_S = 3.0

_SERVING: bytes = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()


async def _check(_: bytes, __: Context) -> bytes:
    return _SERVING


HANDLER = grpc.method_handlers_generic_handler(
    "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(_check)}
)
"""Answers "SERVING" as long as the process's event loop runs."""


class _Peer(Frozen, extra="ignore"):
    """The part of any role's configuration that a prober reads."""

    internal: InternalConfig = InternalConfig()


async def probe(address: str, trust: Trust = EVERYBODY, timeout_s: float = PROBE_S) -> str:
    """The state of the server at `address`: "SERVING", another state of the protocol, or the error of the call."""
    async with trust.dial(address, []) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=trust.metadata
            )
        except grpc.aio.AioRpcError as error:
            return f"{address}: {error.details()}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def main(arguments: Sequence[str]) -> int:
    """Print the state of one server; 0 if it serves, 1 if not, 2 if command line or configuration is wrong."""
    parser = argparse.ArgumentParser("python -m transport.health", description="Is the process at an internal port up?")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the role's YAML; its section `internal` is used")
    parsed = parser.parse_args(arguments)
    try:
        trust = load_trust(load(_Peer, parsed.config).internal, "localhost")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    state = asyncio.run(probe(parsed.address, trust))
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
