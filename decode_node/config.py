"""The decode node's configuration file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hackkv.config import CodecConfig, ListenConfig, ModelConfig, RoleConfig


class DecodeConfig(RoleConfig):
    """Everything a decode node process needs to know."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    faults: Path | None = None
    """For tests: a plan of what goes wrong on this node (`faults/plan.py`)."""
    kv_bytes: int = Field(default=256 << 20, gt=0)
    """Memory for sealed pages."""
    host_bytes: int = Field(default=1 << 30, ge=0)
    """Host memory for sequences that are swapped out. With 0 a request is taken in only when all that it may come to
    is free."""
    max_sequences: int = Field(default=128, gt=0)
    """Requests that may hold room; each owns an open FP16 page per layer."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences in one decode step."""
    replay_tokens: int = Field(default=256, gt=0)
    """Tokens of replays (requests that another node began) that one decode step may carry; at least a page runs."""
    landing_s: float = Field(default=600.0, gt=0)
    """How long a reservation waits for its KV, the prompt's computation included."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long the node goes on after SIGTERM; what is not finished then goes on elsewhere."""
    frame_timeout_s: float = Field(default=300.0, gt=0)
    """How long a handoff may pause between two frames, the time until prefill seals a page included."""
