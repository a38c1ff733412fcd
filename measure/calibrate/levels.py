"""Facts that the codecs `kvquant-*` use: ranges of keys by channel, and levels of keys and values by layer.

Keys are taken before the rotary embedding, as these codecs store them. A channel's range leaves out half a percent of
its values at each end (KVQuant, arXiv 2401.18079, section 3.6). Levels are the means of k groups of the values within
ranges (k-means in one dimension). A value's error counts by its effect on the loss (3.3): by the diagonal of the Fisher
information, which is the square of the loss's gradient with respect to that value. Or all values count alike.

The gradient is that of a value, while levels are of the value relative to its range. So an error should also count by
the square of the range. The authors' code leaves that out, and so do we, since it lost more at 2 bits
(docs/codecs.md).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import torch
from hack_kernels.nuq_format import WIDTHS, cos_sin_of, rotated
from hack_kernels.reference.nuq import middles, outliers_and_range
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model.llama import Llama
from measure.calibrate.gradients import read_gradients
from measure.calibrate.moments import OnTokens, read
from measure.tasks import Ids

LEFT_ASIDE: Final = 0.005
"""Share of a channel's keys beyond each end of its range, on either side."""


class Sensitivity(StrEnum):
    """The weight of a value's error in the choice of levels."""

    FISHER = "fisher"
    """The square of the loss's gradient."""
    NONE = "none"
    """All errors count alike."""


SENSITIVITY: Final = Sensitivity.FISHER
"""The default."""

BINS: Final = 8192
"""Bins of a histogram from -1 to 1."""

ROUNDS: Final = 300

Gradients = tuple[Tensor, Tensor]
"""Gradients of the loss with respect to rows of K and of V."""


class Seen:
    """Keys and values of one layer so far."""

    def __init__(self, device: torch.device) -> None:
        self._keys, self._weights = list[Tensor](), list[Tensor]()
        self._values = torch.zeros(BINS, dtype=torch.float64, device=device)

    def add(self, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, gradients: Gradients | None = None) -> None:
        """Add rows [T, Hkv, D]: keys that cos and sin [T, D/2] have rotated, and values. `gradients` are with respect
        to these rows. Without them all values count alike."""
        back = (cos[:, None], -sin[:, None])
        self._keys.append(rotated(k.float(), *back).half())
        rows = v.half().float()
        middle, reach = middles(outliers_and_range(rows)[1])
        of_v = None
        if gradients is not None:
            # A rotation keeps lengths, so gradients rotate as keys do. BF16 has the range that squares need.
            self._weights.append(rotated(gradients[0].float(), *back).square().bfloat16())
            of_v = gradients[1].float().square()
        self._values += histogram(rows, middle, reach, of_v)

    def tables(self) -> dict[str, Tensor]:
        """The tensors of the layer, float32. Raises `NonFiniteError`."""
        keys = torch.cat(self._keys).float()  # [T, Hkv, D]
        weights = torch.cat(self._weights).float() if self._weights else None
        if not bool(keys.isfinite().all()):
            raise NonFiniteError("a key of the text is not finite in FP16")
        ordered = keys.sort(0).values
        low = int(LEFT_ASIDE * (len(keys) - 1))
        span = torch.stack((ordered[low], ordered[-1 - low]))
        middle, reach = (each[..., 0] for each in middles(span.transpose(0, 1)))
        counts = {"k": histogram(keys, middle, reach, weights), "v": self._values}
        poles = {
            f"{name}_poles_{bits}": means(each, 2**bits).float() for name, each in counts.items() for bits in WIDTHS
        }
        return {"k_range": span, **poles}


def gather_levels(
    model: Llama, windows: tuple[Ids, ...], on_tokens: OnTokens, sensitivity: Sensitivity
) -> dict[str, Tensor]:
    """Name -> tensor of the file. Meanwhile all keys of the windows are held in FP16, with weights of the same size.
    Raises `NonFiniteError`."""
    spec = model.spec
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=model.device)
    seen = [Seen(model.device) for _ in range(spec.num_layers)]

    def see(layer: int, k: Tensor, v: Tensor, positions: Tensor, gradients: Gradients | None = None) -> None:
        seen[layer].add(k, v, *cos_sin_of(positions, frequencies), gradients)

    if sensitivity is Sensitivity.FISHER:
        read_gradients(model, windows, see, on_tokens)
    else:
        read(model, windows, lambda layer, _, k, v, positions: see(layer, k, v, positions), on_tokens)
    found = {f"layers.{i}.{name}": tensor for i, each in enumerate(seen) for name, tensor in each.tables().items()}
    return {name: tensor.cpu().contiguous() for name, tensor in {"frequencies": frequencies, **found}.items()}


def histogram(x: Tensor, middle: Tensor, reach: Tensor, weights: Tensor | None = None) -> Tensor:
    """Histogram, float64 [BINS], of (x - middle) / reach between -1 and 1; values outside do not count.

    With `weights` [like x] a bin holds the sum of its weights, not the number of its values.
    """
    x = (x - middle) / reach
    inside = x.abs() <= 1  # also leaves out NaN, from vectors without a reach
    cost = None if weights is None else weights[inside].double()
    bins = ((x[inside] + 1) * (BINS / 2)).long().clamp(max=BINS - 1)
    return torch.bincount(bins, cost, minlength=BINS).double()


def means(counts: Tensor, groups: int) -> Tensor:
    """Levels, float64 [groups], ascending: the k-means centres of a histogram `counts` [BINS] (Lloyd)."""
    centres = (torch.arange(BINS, dtype=torch.float64, device=counts.device) + 0.5) * (2 / BINS) - 1
    zero = torch.zeros(1, dtype=torch.float64, device=counts.device)
    below, moment = (torch.cat((zero, each.double().cumsum(0))) for each in (counts, counts * centres))
    wanted = (torch.arange(groups, dtype=torch.float64, device=counts.device) + 0.5) / groups * below[-1]
    found = centres[torch.searchsorted(below[1:], wanted).clamp(max=BINS - 1)]
    for _ in range(ROUNDS):
        between = torch.searchsorted(centres, (found[1:] + found[:-1]) / 2)
        edges = torch.nn.functional.pad(between, (1, 0)), torch.nn.functional.pad(between, (0, 1), value=BINS)
        count, total = (each[edges[1]] - each[edges[0]] for each in (below, moment))
        found = torch.where(count > 0, total / count.clamp(min=1), found)
    return found.sort().values
