"""The decode node's configuration file."""

from __future__ import annotations

from pydantic import Field

from hackkv.config import CodecConfig, ListenConfig, ModelConfig, RoleConfig


class DecodeConfig(RoleConfig):
    """Everything a decode node process needs to know."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    kv_bytes: int = Field(default=256 << 20, gt=0)
    """Memory for sealed pages."""
    max_sequences: int = Field(default=128, gt=0)
    """Requests that may hold room; each owns an open FP16 page per layer."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences in one decode step."""
    frame_timeout_s: float = Field(default=300.0, gt=0)
    """How long a handoff may pause between two frames, the time until prefill seals a page included."""
