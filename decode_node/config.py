"""The decode node's configuration file."""

from __future__ import annotations

from pydantic import Field

from hackkv.config import Frozen
from hackkv.nodes import Busiest
from node.config import NodeConfig
from transport.delivery import FRAME_TIMEOUT_S


class DecodeSettings(Frozen):
    """How much a decode node takes on, and how long it waits."""

    host_bytes: int = Field(default=1 << 30, ge=0)
    """Host memory for sequences that are swapped out. With 0 a request is admitted only if all requests can grow to
    their full length within the page pool."""
    prefix_cache: bool = True
    """Whether sealed pages stay when their request is over. A later prompt that begins with the same tokens is not sent
    these pages again."""
    prefix_host_bytes: int = Field(default=256 << 20, ge=0)
    """Host memory for such pages when they have to leave the page pool, beside `host_bytes`. With a codec that needs
    exact rows, a quarter of it is for those at the ends of sequences."""
    max_sequences: int = Field(default=128, gt=0)
    """Requests that may hold room; each owns an open FP16 page per layer."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences in one decode step."""
    replay_tokens: int = Field(default=256, gt=0)
    """Tokens of replays (requests that another node began) in one decode step; at least one page runs."""
    graphs: bool = True
    """Whether decode steps are recorded: a GPU makes CUDA graphs of them before the node serves, the processor runs its
    kernels without Python between them."""
    landing_s: float = Field(default=600.0, gt=0)
    """Seconds that a reservation waits for its KV, the prompt's computation included."""

    @property
    def busiest(self) -> Busiest:
        """A step of the whole batch, or of replays."""
        recorded = self.max_batch if self.graphs else 0
        return Busiest(self.max_sequences, max(self.max_batch, self.replay_tokens), self.max_batch, recorded)


class DecodeConfig(DecodeSettings, NodeConfig):
    """Everything a decode node process needs to know."""

    frame_timeout_s: float = Field(default=FRAME_TIMEOUT_S, gt=0)
    """Seconds that a handoff may pause between two frames, the time until prefill seals a page included."""
