"""`Check` of the standard gRPC health service (grpc.health.v1), so that any prober works, and a prober of our own.

    python -m transport.health HOST:PORT     # exit code 0 if the process there serves

Healthy means that the process answers; whether a node takes part in a fleet is the router's `/ready` to say. Probers
need no token: the answer gives nothing away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from transport.status import Context

PROBE_S = 3.0

_SERVING: bytes = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()


async def _check(_: bytes, __: Context) -> bytes:
    return _SERVING


HANDLER = grpc.method_handlers_generic_handler(
    "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(_check)}
)
"""Answers for a process whose event loop turns."""


def probe(address: str, timeout_s: float = PROBE_S) -> str:
    """Ask the server at `address` how it is: "SERVING", another word of the protocol, or what went wrong."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address}: {error.details() if isinstance(error, grpc.Call) else error}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def main(arguments: Sequence[str]) -> int:
    """Print the state of one server; 0 if it serves, 1 if not, 2 if the command line is wrong."""
    if len(arguments) != 1:
        print("usage: python -m transport.health HOST:PORT", file=sys.stderr)
        return 2
    state = probe(arguments[0])
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
