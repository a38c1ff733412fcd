"""The decode node's configuration file."""

from __future__ import annotations

from pydantic import Field

from hackkv.config import Frozen
from hackkv.nodes import Busiest
from node.config import NodeConfig
from transport.delivery import FRAME_TIMEOUT_S


class DecodeSettings(Frozen):
    """Limits of a decode node: how much work it accepts, and how long it waits."""

    host_bytes: int = Field(default=1 << 30, ge=0)
    """Host memory for sequences that are swapped out. With 0 a request is admitted only if all requests can grow to
    their full length within the page pool."""
    prefix_cache: bool = True
    """Whether sealed pages stay when their request is over. They are not sent again for a later prompt that begins with
    the same tokens."""
    prefix_host_bytes: int = Field(default=256 << 20, ge=0)
    """Host memory for kept pages that have to leave the page pool, in addition to `host_bytes`. With a codec that needs
    exact rows, half of it is for those at the ends of sequences."""
    max_sequences: int = Field(default=128, gt=0)
    """Requests that may hold grants; each owns an open FP16 page per layer."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences in one decode step."""
    replay_tokens: int = Field(default=256, gt=0)
    """Tokens of replays (requests that another node began) in one decode step. At least one page runs."""
    graphs: bool = True
    """Whether decode steps are recorded. A GPU captures them as CUDA graphs before the node serves; a CPU runs their
    kernels without Python in between."""
    landing_s: float = Field(default=600.0, gt=0)
    """Seconds that a reservation waits for its KV, including the computation of the prompt."""

    def busiest(self, device: str) -> Busiest:
        """The largest step: of the whole batch, or of replays."""
        recorded = self.max_batch if self.graphs else 0
        return Busiest(self.max_sequences, max(self.max_batch, self.replay_tokens), self.max_batch, recorded)


class DecodeConfig(DecodeSettings, NodeConfig):
    """Everything a decode node process needs to know."""

    frame_timeout_s: float = Field(default=FRAME_TIMEOUT_S, gt=0)
    """Seconds that a handoff may pause between two frames, including the time until prefill seals a page."""
