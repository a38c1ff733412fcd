"""The check before a process serves: whether its codec spoils its model's answers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch

from hackkv.canary.loss import CHUNK_TOKENS, DECODED_TOKENS
from hackkv.canary.meter import Meter, PresetRow, survey
from hackkv.canary.text import TEXT, TOKENS
from hackkv.codecs import calibrates
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.worker import SHARE_TOKENS, Unloaded, model_folder
from hackkv.nodes import CodecLoss
from hackkv.store import Key, Store
from hackkv.types import WIRE_FORM

log = logging.getLogger(__name__)

_STORE: Final = Store("codec-loss", CodecLoss, "what a codec costs")
VERSION = "1"
"""Increases with every change of how a loss is measured. A change of the text needs none."""


def check_codec(model: ModelConfig, codec: CodecConfig, say: Callable[[str], None] = log.info) -> CodecLoss | None:
    """The loss of the codec on the canary's text, or None for a lossless codec, which is not measured.

    It takes seconds to minutes unless this machine knows the answer already, so never call it on an event loop. `say`
    gets a line before and one after. Raises `ConfigError` if the KL is not below `codec.max_kl` and `codec.allow_loss`
    is not set; the message has the presets that pass. Raises what `load_worker` raises, too.
    """
    if model.threads:
        torch.set_num_threads(model.threads)
    folder = model_folder(model)
    # The folder is looked up once: the checksum of a GGUF file takes longer than a loss from the cache.
    meter = Meter(model.model_copy(update={"path": str(folder.path)}), canary_ids, say)
    planned = meter.plan(codec)
    if planned.codec.lossless:
        return None
    measure = partial(_measured, meter, say)
    row = PresetRow(codec.name, planned.share, measure(planned))
    assert row.loss is not None
    if row.stays_below(codec.max_kl):
        say(f"codec {codec.name} costs {folder.name}: {in_words(row.loss)}")
    elif codec.allow_loss:
        log.warning(
            "codec %s spoils the answers of %s (codec.allow_loss): %s", codec.name, folder.name, in_words(row.loss)
        )
    else:
        raise ConfigError(_refusal(folder.name, codec, row.loss, survey(meter, measure)))
    if calibrates(codec) and planned.codec.origin is None:
        say(f"codec {codec.name} is not calibrated for {folder.name}; it would lose less (hackkv calibrate --help)")
    return row.loss


def canary_ids(planned: Unloaded) -> Sequence[int]:
    """The canary's text in the model's tokens, as much of it as the model's vocabulary and context hold."""
    spec = planned.spec
    known = [token for token in planned.encode(TEXT) if token < spec.vocab]
    return known[: min(TOKENS, spec.max_context)]


def in_words(loss: CodecLoss) -> str:
    """The three numbers of a loss, as text."""
    return (
        f"KL {loss.kl:.3g} from exact KV, {100 * loss.top1:.1f}% of first choices kept, "
        f"perplexity times {loss.perplexity_ratio:.4g} ({loss.tokens} tokens)"
    )


def _measured(meter: Meter, say: Callable[[str], None], planned: Unloaded) -> CodecLoss:
    def measure() -> CodecLoss:
        say(f"checking what codec {planned.codec.name} costs this model ...")
        return meter.measure(planned)

    return _STORE.remembered(loss_key(planned, TEXT, TOKENS), measure)


def loss_key(planned: Unloaded, text: str, tokens: int) -> Key:
    """Everything that determines a loss on at most `tokens` tokens of `text`.

    The kernels are part of it: they serve, and a fault may be in them.
    """
    return (
        ("canary", VERSION),
        ("text", hashlib.sha256(text.encode()).hexdigest()),
        ("reading", f"{min(tokens, planned.spec.max_context)} {CHUNK_TOKENS} {DECODED_TOKENS}"),
        ("kernels", planned.kernels),
        *(field for field in planned.fingerprint().fields if field[0] != WIRE_FORM),
    )


def _refusal(model: str, codec: CodecConfig, loss: CodecLoss, rows: Iterable[PresetRow]) -> str:
    passing = [row for row in rows if row.stays_below(codec.max_kl) and not row.evicts]
    lines = [
        f"codec.name: {codec.name!r} would spoil the answers of {model}: {in_words(loss)}; "
        f"codec.max_kl is {codec.max_kl:g}"
    ]
    lines.append("presets that pass, smallest first:" if passing else "no preset passes")
    width = max((len(row.name) for row in passing), default=0)
    for row in passing:
        kl = "lossless" if row.loss is None else f"KL {row.loss.kl:.3g}"
        lines.append(f"  {row.name:{width}}  {100 * row.share:5.1f}% of FP16's bytes at {SHARE_TOKENS} tokens  {kl}")
    lines.append(f"codec.allow_loss: true (hackkv serve --codec {codec.name},allow_loss) serves it all the same")
    return "\n".join(lines)
