"""The settings that the configuration files of prefill and decode nodes share."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hackkv.config import CodecConfig, ListenConfig, ModelConfig, RoleConfig
from hackkv.nodes import Busiest
from transport.wires import DEFAULT_WIRE


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class NodeConfig(RoleConfig):
    """The settings of a node process of either role."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    wire: Annotated[tuple[str, ...], BeforeValidator(_listed)] = (DEFAULT_WIRE,)
    """The wires of the KV: one or several names of `transport.wires.WIRES`. The router takes the first wire of the
    prefill node that the decode node also has. Nodes that share no wire cannot join one fleet."""
    faults: Path | None = None
    """For tests: a file with the faults of this node (`faults/plan.py`)."""
    kv_bytes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Memory for sealed pages, in bytes. `auto` takes the memory that a GPU has left, or 256 MiB on a CPU."""
    nodes_on_device: int = Field(default=1, gt=0)
    """Nodes that share the node's GPU, including this one. `auto` takes this node's share of the memory."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds for which a node goes on with its requests after SIGTERM. Then the rest goes on at other nodes."""

    @abstractmethod
    def busiest(self, device: str) -> Busiest:
        """The largest load that these settings allow at a time on a type of device, as torch names it."""
