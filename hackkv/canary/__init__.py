"""The canary: what a lossy codec costs a model, measured before the model serves. Nobody serves gibberish unasked.

A process calls `check_codec` before it serves. `Meter` measures codecs on any text.
"""

from __future__ import annotations

from hackkv.canary.check import check_codec, loss_key
from hackkv.canary.loss import Pace, Reference, codec_loss, read_exactly
from hackkv.canary.meter import Meter, PresetRow, survey

__all__ = ["Meter", "Pace", "PresetRow", "Reference", "check_codec", "codec_loss", "loss_key", "read_exactly", "survey"]
