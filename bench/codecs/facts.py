"""Facts about each row: bytes from its pages, loss from docs/accuracy, times from docs/codecs.json."""

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
"""Numbers of tokens read."""
HEAD_DIM: Final = 128


@dataclass(frozen=True, slots=True)
class Lost:
    """Losses against exact KV."""

    kl: float
    top1: float
    perplexity: float
    perplexity_change: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about one row. Values that were not measured are missing."""

    row: CodecRow
    resting: float
    """Bytes at rest of K and V of a token and KV head, at head_dim 128; mean over layers."""
    sent: float
    """The same bytes on the wire, before coding."""
    share: float
    """Share of FP16's bytes, at rest, for a SmolLM2 sequence of 2,048 tokens."""
    long_mb: float
    """MB at rest of 8,192 tokens of SmolLM2."""
    evicts: bool
    lost: Mapping[int, Lost] = field(default_factory=dict)
    """Tokens -> losses: on held-out text, or, if rows are evicted, on the text after a prompt."""
    jct: Mapping[tuple[str, str], Record] = field(default_factory=dict)
    """(prompt, link) -> record."""

    def jct_s(self, prompt: str, link: str) -> float | None:
        """Mean seconds of a job; None if not measured."""
        record = self.jct.get((prompt, link))
        return None if record is None else record["mean_e2el_ms"] / 1e3

    def wire_share(self, prompt: str) -> float | None:
        """Share of FP16's bytes that crossed the wire, coded and with headers; None if not measured."""
        return next((record["kv_share"] for (of, _), record in self.jct.items() if of == prompt), None)


def gather(accuracy: Path, times: Mapping[Key, Record]) -> list[Facts]:
    """Facts of every row. Raises `ConfigError` naming a file that is not one of `hackkv eval`."""
    found = read(accuracy / SMOLLM2_NAME)
    # Bytes are the same on every instruction set, so the reference backend will do.
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
    """Bytes of a token and KV head at head_dim 128: (at rest, on the wire)."""
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
