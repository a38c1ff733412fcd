"""The rows of docs/codecs.md: every preset, some with other settings, and rivals as the HACK paper timed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hackkv.codecs import CODECS, PROJECTED
from hackkv.config import CodecConfig
from measure.accuracy.variants import VARIANTS

MODEL: Final = "smollm2"
UNFUSED: Final = ("fp8", "mxfp4", "kivi-4", "kivi-2", "kvquant-4", "kvquant-2", "kvcomp", "cachegen", "cachegen-eq86")
"""Presets with a second row whose kernels write FP16 rows to memory in every call before they attend."""
BESIDE: Final = ("kvquant-3", "kvcomp-channel", "mpcache-static", "snapkv-rot-k4v4")
"""Rows of `hackkv eval` that are not presets."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec with its settings."""

    name: str
    """Also the name of its row in `bench.kernels`."""
    codec: CodecConfig
    answers: str
    """The row of `hackkv eval` with its loss. An unfused row takes that of its fused row, which gives equal bytes."""
    timed: bool = True
    """Whether its times are measured; else it differs from another row only in its loss."""

    @property
    def is_strawman(self) -> bool:
        """Whether it is an unfused row, which writes FP16 rows in every call."""
        return self.name != self.answers


def _rows() -> tuple[CodecRow, ...]:
    known = {variant.name: variant.codec for variant in VARIANTS}
    fused = [CodecRow(name, known[name], name) for name in (*CODECS, *BESIDE) if name not in PROJECTED]
    straw = [CodecRow(f"{name}-unfused", CodecConfig(name=name, settings={"unfused": True}), name) for name in UNFUSED]
    plain = [CodecRow(name, known[name], name, timed=False) for name in known if name.endswith("-plain")]
    return (*fused, *plain, *straw)


ROWS: Final = {row.name: row for row in _rows()}
"""Name -> row. `zack` is left out: it needs a calibration, and nobody should make one for this model."""
