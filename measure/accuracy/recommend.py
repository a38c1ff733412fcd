"""Which preset for this model? The canary's measurement of all of them (`hackkv.canary`), on more text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hackkv.canary import Meter, Pace, PresetRow, loss_key, survey
from hackkv.codec import rows_held
from hackkv.codec_footprint import footprint_of
from hackkv.codecs import CODECS
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import EXACT_CODEC
from hackkv.errors import ConfigError
from hackkv.model.worker import Unloaded, model_folder
from hackkv.nodes import CodecLoss
from hackkv.store import Store
from measure.accuracy.advice import advice
from measure.accuracy.text import held_out

TOKENS: Final = 1024
"""The most tokens that are read."""
TOKEN_CHARS: Final = 16
"""An upper bound of the characters per token, as a mean over any text."""
JOB_PROMPT, JOB_ANSWER = 1024, 128
"""The job whose time is estimated: tokens of prompt and answer."""
LINK_GBIT_S: Final = 1.0
"""The default link between prefill and decode."""


@dataclass(frozen=True, slots=True)
class PresetCost:
    """A preset's loss on a model, and its measured speed."""

    loss: CodecLoss
    pace: Pace


_STORE: Final = Store("recommended", PresetCost, "what a preset costs")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The cost of every preset to a model."""

    model: str
    source: str
    """Where the text comes from."""
    rows: tuple[PresetRow, ...]
    """Smallest first."""
    jct_s: Mapping[str, float]
    """Preset -> seconds of the job, estimated from this machine's pace: one request alone, nothing overlapping."""
    link_gbit_s: float
    """The link of the estimate."""

    @property
    def advice(self) -> str:
        """One line (`measure.accuracy.advice`)."""
        return advice(self.rows, self.jct_s)


def recommend(model: ModelConfig, link_gbit_s: float, console: Console) -> Recommendation:
    """Measure every preset on held-out text, under a progress bar. The estimate of the job sends KV over a link of
    `link_gbit_s`. Raises `ConfigError`, `CheckpointError`.

    Measurements stay in the user's cache, so a run that was stopped continues from there.
    """
    if model.threads:
        torch.set_num_threads(model.threads)
    folder = model_folder(model)
    text = held_out(folder.path)
    written = "\n\n".join(document.text for document in text.documents)[: TOKENS * TOKEN_CHARS]

    def ids(planned: Unloaded) -> Sequence[int]:
        known = [token for token in planned.encode(written) if token < planned.spec.vocab]
        found = known[: min(TOKENS, planned.spec.max_context)]
        if len(found) < 2:
            raise ConfigError(f"{text.source}: {len(found)} tokens are too few to measure anything")
        return found

    meter, jct_s = Meter(model.model_copy(update={"path": str(folder.path)}), ids), dict[str, float]()
    fields = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*fields, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(CODECS))

        def measure(planned: Unloaded) -> CodecLoss:
            progress.update(bar, description=planned.codec.name)
            if not console.is_terminal:  # a log shows no progress bar
                console.print(f"measuring {planned.codec.name} ...", markup=False)
            key = (*loss_key(planned, written, TOKENS), ("threads", str(torch.get_num_threads())))
            found = _STORE.remembered(key, lambda: _measured(meter, planned))
            jct_s[planned.codec.name] = _jct(planned, found.pace, link_gbit_s)
            progress.update(bar, advance=1)
            return found.loss

        began = perf_counter()
        measure(meter.plan(CodecConfig(name=EXACT_CODEC)))  # exact KV loses nothing, but its time is needed
        minutes = (len(CODECS) - 1) * (perf_counter() - began) / 60
        console.print(f"{len(CODECS)} presets, some {minutes:.0f} minutes, less for what was measured before")
        rows = survey(meter, measure)
    return Recommendation(folder.name, text.source, tuple(rows), jct_s, link_gbit_s)


def _measured(meter: Meter, planned: Unloaded) -> PresetCost:
    pace = Pace()
    loss = meter.measure(planned, pace)
    return PresetCost(loss, pace)


def _jct(planned: Unloaded, pace: Pace, link_gbit_s: float) -> float:
    """Seconds of the job: prefill and decode at their measured pace, and its bytes over the link."""
    sizes = footprint_of(planned.codec, planned.spec.kv_layout(planned.codec.page_tokens))
    sent = rows_held(planned.codec, JOB_PROMPT) * sizes.wire_page_bytes / sizes.page_tokens
    prefill = JOB_PROMPT * pace.prefill_s / max(1, pace.prefill_tokens)
    return prefill + 8 * sent / (1e9 * link_gbit_s) + JOB_ANSWER * pace.decode_s / max(1, pace.decode_tokens)


HEADS: Final = ("of FP16's bytes", "KL", "first choices kept", "perplexity ×", "JCT")


def show(found: Recommendation, console: Console) -> None:
    """Print the table and the advice."""
    table = Table(title=f"{found.model}: {_text(found)}", title_justify="left")
    table.add_column("preset", no_wrap=True, min_width=max(len(row.name) for row in found.rows))
    for name in HEADS:
        table.add_column(name, justify="right")
    for line in _lines(found):
        table.add_row(*line)
    console.print(table)
    console.print(_job(found), soft_wrap=True)
    console.print(f"Advice: {found.advice}", markup=False, soft_wrap=True)


def as_markdown(found: Recommendation, where: str) -> str:
    """The table and the advice for a page; `where` says where they were measured."""
    lines = [
        f"{_text(found).capitalize()}; {where}.",
        "",
        f"| preset | {' | '.join(HEADS)} |",
        f"|---|{'---|' * len(HEADS)}",
        *(f"| `{name}` | {' | '.join(cells)} |" for name, *cells in _lines(found)),
        "",
        f"{_job(found)} Advice: {found.advice}.",
    ]
    return "\n".join(lines) + "\n"


def _job(found: Recommendation) -> str:
    return (
        f"JCT: an estimate for {JOB_PROMPT:,} tokens of prompt and {JOB_ANSWER} of answer, one request alone on this "
        f"machine, KV over {found.link_gbit_s:g} Gbit/s (--link-gbit-s)."
    )


def _text(found: Recommendation) -> str:
    tokens = max((row.loss.tokens for row in found.rows if row.loss is not None), default=0)
    return f"{tokens} tokens of {found.source}"


def _lines(found: Recommendation) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            f"{100 * row.share:.1f}%",
            *_cells(row.loss),
            _seconds(found.jct_s[row.name]),
        )
        for row in found.rows
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _cells(loss: CodecLoss | None) -> tuple[str, str, str]:
    if loss is None:
        return "lossless", "", ""
    return f"{loss.kl:.4f}", f"{100 * loss.top1:.1f}%", f"{loss.perplexity_ratio:.4f}"
