"""What the configuration files of prefill and decode nodes have in common."""

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
    """Everything that a node process needs to know whatever its role."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    wire: Annotated[tuple[str, ...], BeforeValidator(_listed)] = (DEFAULT_WIRE,)
    """How KV travels: one or several names of `transport.wires.WIRES`. The router takes the first wire of the prefill
    node that the decode node has too. Nodes that share none do not join one fleet."""
    faults: Path | None = None
    """For tests: a plan of what goes wrong on this node (`faults/plan.py`)."""
    kv_bytes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Memory for sealed pages, in bytes. `auto` takes what a GPU has left, and 256 MiB on the processor."""
    nodes_on_device: int = Field(default=1, gt=0)
    """Nodes that share the node's GPU, this one among them, of whose memory `auto` takes its part."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long a node goes on with its requests after SIGTERM, in seconds. Then the rest goes on at other nodes."""

    @property
    @abstractmethod
    def busiest(self) -> Busiest:
        """The most that these settings let the node do at a time."""
