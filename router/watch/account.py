"""Accounts of one or several sequences: time by stage in seconds, KV by plane in bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from hackkv.nodes import CodecLoss
from hackkv.timing import StageClock
from hackkv.types import Receipt


def time_account(clock: StageClock) -> dict[str, Any]:
    """Stages, and the total that they sum to; sub-stages are parts of stages."""
    stages = {str(stage): seconds for stage, seconds in clock.stages().items()}
    sub_stages = {str(stage): seconds for stage, seconds in clock.sub_stages.items()}
    return {"stages": stages, "sub_stages": sub_stages, "total_s": sum(stages.values())}


def kv_account(codec: str, receipts: Iterable[Receipt]) -> dict[str, Any]:
    """The bytes that were moved, by plane, and those that FP16 would have taken; for JSON."""
    planes: Counter[str] = Counter()
    header = fp16 = tokens = 0
    for receipt in receipts:
        planes.update(dict(receipt.bytes_by_plane))
        header, fp16 = header + receipt.header_bytes, fp16 + receipt.fp16_bytes
        tokens += receipt.tokens
    return {
        "codec": codec,
        "bytes_by_plane": dict(planes),
        "header_bytes": header,
        "fp16_bytes": fp16,
        "ratio": (planes.total() + header) / fp16 if fp16 else None,
        "tokens": tokens,
    }


def codec_loss(loss: CodecLoss | None) -> dict[str, float | None] | None:
    """The loss of a codec on a node's model, for JSON. NaN and infinity, which JSON lacks, are None."""
    if loss is None:
        return None
    numbers = {"kl": loss.kl, "top1": loss.top1, "perplexity_ratio": loss.perplexity_ratio, "tokens": loss.tokens}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
