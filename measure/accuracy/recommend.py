"""Which preset for this model? The canary's measurement of all of them (`hackkv.canary`), on more text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from hackkv.canary import Meter, Row, survey
from hackkv.config import DEFAULT_MAX_KL, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model
from hackkv.model.worker import Unloaded
from hackkv.nodes import CodecLoss
from measure.accuracy.text import held_out

TOKENS: Final = 2048
"""The most tokens that are read."""
TOKEN_CHARS: Final = 16
"""More characters than a token has on average in any text."""
CLOSE_KL: Final = 0.03
"""Below it a codec is hard to tell from exact KV."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What every preset costs a model."""

    model: str
    source: str
    """Where the text comes from."""
    rows: tuple[Row, ...]
    """Smallest first."""

    @property
    def advice(self) -> str:
        """One line: the smallest preset that serves, and the smallest that is hard to tell from exact KV."""
        picks = (f"{_smallest(self.rows, kl)} is the smallest below KL {kl:g}" for kl in (DEFAULT_MAX_KL, CLOSE_KL))
        return "; ".join(picks)


def recommend(model: ModelConfig, say: Callable[[str], None]) -> Recommendation:
    """Measure every preset on held-out text. `say` gets a line before each. Raises `ConfigError`, `CheckpointError`."""
    if model.threads:
        torch.set_num_threads(model.threads)
    folder = find_model(model.path, model.dtype)
    text = held_out(folder.path)
    written = "\n\n".join(document.text for document in text.documents)[: TOKENS * TOKEN_CHARS]

    def ids(planned: Unloaded) -> Sequence[int]:
        known = [token for token in planned.encode(written) if token < planned.spec.vocab]
        found = known[: min(TOKENS, planned.spec.max_context)]
        if len(found) < 2:
            raise ConfigError(f"{text.source}: {len(found)} tokens are too few to measure anything")
        return found

    meter = Meter(model.model_copy(update={"path": str(folder.path)}), ids)

    def measure(planned: Unloaded) -> CodecLoss:
        say(f"measuring {planned.codec.name} ...")
        return meter.measure(planned)

    return Recommendation(folder.name, text.source, tuple(survey(meter, measure)))


def show(found: Recommendation, console: Console) -> None:
    """Print the table and the advice."""
    tokens = max((row.loss.tokens for row in found.rows if row.loss is not None), default=0)
    table = Table("preset", title=f"{found.model}: {tokens} tokens of {found.source}", title_justify="left")
    for name in ("of FP16's bytes", "KL", "first choices kept", "perplexity ×"):
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(row.name, f"{100 * row.share:.1f}%", *_cells(row.loss))
    console.print(table)
    console.print(found.advice, markup=False, soft_wrap=True)


def _cells(loss: CodecLoss | None) -> tuple[str, str, str]:
    if loss is None:
        return "lossless", "", ""
    return f"{loss.kl:.4f}", f"{100 * loss.top1:.1f}%", f"{loss.perplexity_ratio:.4f}"


def _smallest(rows: Sequence[Row], kl: float) -> str:
    return next((row.name for row in rows if row.stays_below(kl)), "none")
