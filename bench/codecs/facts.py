"""What is known of each row: bytes from its pages, loss from docs/accuracy, times from docs/codecs.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hack_kernels import load

from bench.codecs.jct import Key, Record
from bench.codecs.rows import MODEL, ROWS, CodecRow
from hackkv.codec import planes_bytes, rows_held
from hackkv.codec_footprint import footprint_of
from hackkv.codecs import make_codec
from hackkv.config import ModelConfig
from hackkv.model.shipped import SMOLLM2_NAME, find_model
from hackkv.model.worker import Unloaded, plan_worker
from hackkv.types import KvShape
from measure.accuracy.metrics import Measure
from measure.accuracy.results import Results, read

READING, CONTINUING = "reading", "continuing"
SHORT, LONG = 2048, 8192
"""Tokens read."""
HEAD_DIM: Final = 128


@dataclass(frozen=True, slots=True)
class Lost:
    """Beside exact KV."""

    kl: float
    top1: float
    perplexity: float
    perplexity_change: float


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one row. What was not measured is missing."""

    row: CodecRow
    resting: float
    """Bytes of a token and KV head, K and V, head_dim 128, at rest; the mean of layers."""
    sent: float
    """On the wire, before coding."""
    share: float
    """Of FP16's bytes, at rest, a SmolLM2 sequence of 2,048 tokens."""
    long_mb: float
    """MB at rest of 8,192 tokens of it."""
    evicts: bool
    lost: Mapping[int, Lost] = field(default_factory=dict)
    """By tokens: of held-out text, or, where rows are evicted, of what follows a prompt."""
    jct: Mapping[tuple[str, str], Record] = field(default_factory=dict)
    """By prompt and link."""

    def jct_s(self, prompt: str, link: str) -> float | None:
        """Mean seconds of a job."""
        record = self.jct.get((prompt, link))
        return None if record is None else record["mean_e2el_ms"] / 1e3

    def wire_share(self, prompt: str) -> float | None:
        """Of FP16's bytes, as they crossed the wire, coded and with headers."""
        return next((record["kv_share"] for (of, _), record in self.jct.items() if of == prompt), None)


def gather(accuracy: Path, times: Mapping[Key, Record]) -> list[Facts]:
    """Facts of every row. Raises `ConfigError` naming a file of `hackkv eval` that is none."""
    found = read(accuracy / SMOLLM2_NAME)
    # Bytes are the same on every instruction set and need no kernels.
    model = ModelConfig(path=str(find_model(MODEL).path), backend="reference")
    return [_facts(row, plan_worker(model, row.codec), found, times) for row in ROWS.values()]


def _facts(row: CodecRow, planned: Unloaded, found: Results, times: Mapping[Key, Record]) -> Facts:
    resting, sent = _page_bytes(row)
    layout = planned.spec.kv_layout(planned.codec.page_tokens)
    sizes = footprint_of(planned.codec, layout)
    evicts = planned.codec.eviction is not None
    return Facts(
        row,
        resting,
        sent,
        planned.share,
        sizes.resting_bytes(rows_held(planned.codec, LONG)) / 1e6,
        evicts,
        lost={point: lost for point in (SHORT, LONG) if (lost := _lost(found, row, point, evicts)) is not None},
        jct={(prompt, link): record for (prompt, link, name), record in times.items() if name == row.name},
    )


def _page_bytes(row: CodecRow) -> tuple[float, float]:
    """Of a token and KV head at head_dim 128, at rest and on the wire."""
    shape = KvShape(30, 1, HEAD_DIM)
    codec = make_codec(row.codec, shape, load("reference"))
    rows = shape.num_layers * codec.page_tokens
    return sum(fmt.page_bytes for fmt in codec.formats) / rows, sum(map(planes_bytes, codec.wire_planes)) / rows


def _lost(found: Results, row: CodecRow, point: int, evicts: bool) -> Lost | None:
    task = CONTINUING if evicts else READING
    wanted = (Measure.KL, Measure.TOP1, Measure.PERPLEXITY)
    kl, top1, perplexity = (found.find(row.answers, task, point, measure) for measure in wanted)
    if kl is None or top1 is None or perplexity is None:
        return None
    return Lost(kl.score.value, top1.score.value, perplexity.score.value, perplexity.change.value)
