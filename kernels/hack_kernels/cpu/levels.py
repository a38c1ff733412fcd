"""Pages of levels."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.check import check_seal
from hack_kernels.cpu.attention import attend
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.resting import RestingCodes
from hack_kernels.level_format import GAIN_STEP, Feedback, LevelFormat, Scales

GAIN_BLOCK: Final = 8


class LevelCpu(RestingCodes):
    """Implements `LevelKernels`."""

    served_by = "cpu"

    def __init__(self, fmt: LevelFormat, native: Any) -> None:
        super().__init__(fmt, native, native_format(fmt, None))
        self.fmt = fmt
        self._sealing: dict[int, Any] = {}
        """Layer -> the format with that layer's feedback."""

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        """Keep gains in the order of the kernel, which applies a channel's level to eight channels at once."""
        feedback.check(self.fmt.head_dim)
        self._sealing[layer] = native_format(self.fmt, feedback)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool, in native order."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._native.seal(self._sealing.get(layer, self._native_format), layer, pool.planes, *rows, pool.head_start)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Few queries read packed codes as they rest. Many queries unpack a page once per block of queries."""
        return attend(self._native, self._native_format, layer, pool, spans, rows)


def native_format(fmt: LevelFormat, feedback: Feedback | None) -> Any:
    """`fmt` for C++, with the feedback of a layer's seals."""
    gains, pair_gains, weights = (None, None, None) if feedback is None else native_feedback(feedback)
    return compiled().level_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        k_bits=fmt.k_bits,
        v_bits=fmt.v_bits,
        narrow_scales=fmt.scales is Scales.FP8,
        sink=fmt.window.sink,
        recent=fmt.window.recent,
        gains=gains,
        pair_gains=pair_gains,
        weights=weights,
    )


def native_feedback(feedback: Feedback) -> tuple[Tensor, Tensor, Tensor]:
    """Gains [heads, D/8, D, 8]; gains of pairs of channels [heads, D/8, D/2, 8], two words of 16 bits each; weights
    [heads, D]. C++ borrows them in this order (level_format.h) and keeps them alive."""
    gains = feedback.gains.mT.unflatten(-1, (-1, GAIN_BLOCK)).transpose(1, 2).contiguous()
    words = (gains / GAIN_STEP).to(torch.int16).unflatten(2, (-1, 2)).movedim(3, -1)  # [heads, D/8, D/2, 8, 2]
    pair_gains = words.contiguous().view(torch.int32).squeeze(-1)
    return gains, pair_gains, feedback.weights.contiguous()
