"""Measures codecs on one model and one text. Nothing is loaded until a measurement needs it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hackkv.canary.loss import Pace, Reference, codec_loss, compile_for, read_exactly
from hackkv.codecs import CODECS
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.llama import Llama
from hackkv.model.worker import Unloaded, plan_worker
from hackkv.nodes import CodecLoss

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PresetRow:
    """A preset and what it costs."""

    name: str
    share: float
    """Bytes at rest, as a share of FP16's (`Unloaded.share`)."""
    loss: CodecLoss | None
    """None for a lossless codec, which is not measured."""
    evicts: bool = False
    """Whether rows of prompts are evicted. Such a preset is never advised: no text shows who will need those rows."""

    def stays_below(self, kl: float) -> bool:
        """Whether the codec may serve under the bound. A KL that is not a number never is below one."""
        return self.loss is None or self.loss.kl <= kl


class Meter:
    """Measures codecs on one model and one text. At most one copy of the weights is held, besides mapped ones."""

    def __init__(
        self, model: ModelConfig, ids: Callable[[Unloaded], Sequence[int]], say: Callable[[str], None] = log.info
    ) -> None:
        """`ids` gives the text: at least two tokens that the model knows. It is called once at most. `say` gets a line
        now and then while kernels are compiled."""
        self._model, self._ids, self._say = model, ids, say
        self._plain: Llama | None = None
        self._reference: Reference | None = None

    def plan(self, codec: CodecConfig) -> Unloaded:
        """A worker of the model with `codec`, before it is loaded. Raises `ConfigError`, `CheckpointError`."""
        return plan_worker(self._model, codec)

    def measure(self, planned: Unloaded, pace: Pace | None = None) -> CodecLoss:
        """The loss of the codec of `planned`. Its time is added to `pace`.

        Raises `CheckpointError` if the weights cannot be loaded.
        """
        if self._reference is None:
            self._reference = read_exactly(self._load_plain(planned), self._ids(planned))
        if not planned.codec.prepares_weights:
            model = self._load_plain(planned)
        else:
            self._plain = None
            gc.collect()  # before the second copy is read
            model = planned.load()
        if compiler := planned.backend.compiler:
            compile_for(model, planned.codec, self._reference.ids, compiler, self._say)
        return codec_loss(model, planned.codec, self._reference, pace)

    def _load_plain(self, planned: Unloaded) -> Llama:
        if self._plain is None:
            self._plain = planned.load_plain()
        return self._plain


Measure = Callable[[Unloaded], CodecLoss]


def survey(meter: Meter, measure: Measure) -> list[PresetRow]:
    """Every preset that this model can have, smallest first. `measure` is called for the lossy ones."""
    planned = list[Unloaded]()
    for name in CODECS:
        try:
            planned.append(meter.plan(CodecConfig(name=name)))
        except ConfigError:
            continue  # no shape for this format, or a preset that needs a file
    # Codecs that fold something into the weights come last: each takes a copy of its own.
    rows = [
        PresetRow(
            each.codec.name,
            each.share,
            None if each.codec.lossless else measure(each),
            evicts=each.codec.eviction is not None,
        )
        for each in sorted(planned, key=lambda each: each.codec.prepares_weights)
    ]
    return sorted(rows, key=lambda row: row.share)
