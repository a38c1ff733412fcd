"""The prefill node's configuration file."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from hackkv.config import Frozen
from hackkv.nodes import Busiest
from node.config import NodeConfig
from prefill_node.fetch_choice import PrefixFetch

CHUNK_TOKENS: Final = 512
GPU_CHUNK_TOKENS: Final = 4096
"""`chunk_tokens: auto`. Passes of 512 rows took 5 to 6 ms a layer on an H200 (docs/gpu.md)."""
SCORED_ROWS: Final = 512
"""Rows of a prompt whose logits are computed at a time."""


class PrefillSettings(Frozen):
    """Limits of a prefill node: how much work it accepts, and how long it waits."""

    max_prompts: int = Field(default=64, gt=0)
    """Prompts that may be under way at once; each owns an open FP16 page per layer."""
    chunk_tokens: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Token budget of one forward pass; rounded down to whole pages. `auto` is 512 on the processor and 4,096 on a
    GPU."""
    frame_bytes: int = Field(default=512 << 10, gt=0)
    """A frame of KV leaves when it has this many bytes; until then it waits for the pages of the next layer. 1 sends
    each layer by itself. Each frame takes time on both nodes (`python -m bench.handoff`). While the first one gathers,
    the link is idle: 512 KiB take 20 ms on 200 Mbit/s."""
    host_bytes: int = Field(default=1 << 30, gt=0)
    """Host memory for compressed KV of prompts that run or wait for a decode node. The rest keeps KV of requests that
    are being decoded, in case their decode node dies, and prefixes that prompts may share."""
    unassigned_s: float = Field(default=300.0, gt=0)
    """Seconds that finished KV waits for a decode node to be named. Then the KV is given up."""
    kept_s: float = Field(default=1800.0, gt=0)
    """Seconds that KV is kept after its handoff. It is given up earlier when the request ends."""
    prefix_cache: bool = True
    """Whether prompts share the pages of a common beginning; idle ones stay in the page pool, then in host memory."""
    resume_points: int = Field(default=64, gt=0)
    """Points at which later prompts can go on, for codecs that keep the latest rows exact: ends of conversations and of
    shared prefixes. Each takes the memory of those rows when it is first used."""
    prefix_fetch: PrefixFetch = PrefixFetch.AUTO
    """Whether pages that a prompt lacks here come from the decode node that holds them."""
    fetch_s: float = Field(default=10.0, gt=0)
    """Seconds that a fetch may take. Then the pages are computed. With `auto` a fetch may be given up sooner."""
    assumed_bytes_per_s: float = Field(default=1e8, gt=0)
    """The speed of a link that has not been measured yet."""
    assumed_tokens_per_s: float = Field(default=2000.0, gt=0)
    """The speed of this node's passes before the first one."""
    queue_tokens: int = Field(default=1 << 20, gt=0)
    """Prompt tokens that may wait to be computed. A prompt beyond them is refused, unless no other one waits."""

    def chunk_tokens_on(self, device: str) -> int:
        """`chunk_tokens` for a type of device, as torch names it."""
        if self.chunk_tokens != "auto":
            return self.chunk_tokens
        return CHUNK_TOKENS if device == "cpu" else GPU_CHUNK_TOKENS

    def busiest(self, device: str) -> Busiest:
        """The largest pass: every slot, resume points included, and a full budget of rows. Its last rows choose tokens,
        and its other rows are scored in turn."""
        rows = self.chunk_tokens_on(device)
        return Busiest(self.max_prompts + self.resume_points, rows, max(min(rows, SCORED_ROWS), self.max_prompts))


class PrefillConfig(PrefillSettings, NodeConfig):
    """Everything a prefill node process needs to know."""
