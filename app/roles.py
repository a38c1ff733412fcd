"""The roles of a cluster, as the command line and the fork server run them."""

from __future__ import annotations

from typing import Final

ROUTER: Final = "router"
ROLES: Final = {ROUTER: "router.__main__", "prefill": "prefill_node.__main__", "decode": "decode_node.__main__"}
"""Role -> module whose `main` takes the command line's arguments and returns the exit code."""

ENVIRONMENT: Final = {
    # gRPC's own messages about broken connections would only repeat ours.
    "GRPC_VERBOSITY": "ERROR",
    # Compute threads that wait must not spin, since processes share the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # numpy's threads would start when it is imported, and a fork server must have none. Nodes compute with torch.
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of every process that computes, unless the environment sets them. Libraries read them when they load."""
