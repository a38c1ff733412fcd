"""The prefill node's configuration file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hackkv.config import CodecConfig, ListenConfig, ModelConfig, RoleConfig


class PrefillConfig(RoleConfig):
    """Everything a prefill node process needs to know."""

    listen: ListenConfig = ListenConfig()
    router: str = ""
    """Control address (host:port) of the router to register with; empty for nodes that the router lists itself."""
    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    faults: Path | None = None
    """For tests: a plan of what goes wrong on this node (`faults/plan.py`)."""
    kv_bytes: int = Field(default=256 << 20, gt=0)
    """Memory for sealed pages."""
    max_prompts: int = Field(default=64, gt=0)
    """Prompts that may be under way at once; each owns an open FP16 page per layer."""
    chunk_tokens: int = Field(default=512, gt=0)
    """Token budget of one forward pass; rounded down to whole pages."""
    host_bytes: int = Field(default=1 << 30, gt=0)
    """Host memory for compressed KV: of prompts that run or wait for a decode node, and, as long as there is room, of
    requests that are being decoded, kept in case their decode node dies, and of prefixes that prompts may share."""
    unassigned_s: float = Field(default=300.0, gt=0)
    """How long finished KV waits for a decode node to be named before it is given up, in seconds."""
    kept_s: float = Field(default=1800.0, gt=0)
    """How long KV is kept after its handoff, in seconds; the end of the request ends it sooner."""
    prefix_cache: bool = True
    """Whether prompts share the pages of a common beginning; idle ones stay in the page pool, then in host memory."""
    queue_tokens: int = Field(default=1 << 20, gt=0)
    """Prompt tokens that may wait to be computed; a prompt beyond that is turned away, unless it is the only one."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long a node that was told to stop (SIGTERM) goes on with what it has, in seconds."""
