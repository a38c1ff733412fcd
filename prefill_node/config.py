"""The prefill node's configuration file."""

from __future__ import annotations

from pydantic import Field

from hackkv.config import CodecConfig, ListenConfig, ModelConfig, RoleConfig


class PrefillConfig(RoleConfig):
    """Everything a prefill node process needs to know."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    kv_bytes: int = Field(default=256 << 20, gt=0)
    """Memory for sealed pages."""
    max_prompts: int = Field(default=64, gt=0)
    """Prompts that may be under way at once; each owns an open FP16 page per layer."""
    chunk_tokens: int = Field(default=512, gt=0)
    """Token budget of one forward pass; rounded down to whole pages."""
    outbox_bytes: int = Field(default=1 << 30, gt=0)
    """Host memory for compressed KV that waits for a decode node; above it no further prompt starts."""
