"""What the codecs `kvquant-*` may know of a model: ranges of keys by channel, and levels of keys and values by layer.

Keys are looked at as they rest there, before the rotary embedding. A channel's range leaves out half a percent of its
values at each end (KVQuant, arXiv 2401.18079, section 3.6). Levels are the means of k groups of what lies within ranges
(k-means in one dimension); every value counts alike, where the paper weighs it by the loss's gradient (3.3).
"""

from __future__ import annotations

from typing import Final

import torch
from hack_kernels.nuq_format import WIDTHS, turned, turns_of
from hack_kernels.reference.nuq import middles, outliers_and_range
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model.llama import Llama
from measure.calibrate.moments import OnTokens, read
from measure.tasks import Ids

LEFT_ASIDE: Final = 0.005
"""Share of a channel's keys beyond each end of its range."""

BINS: Final = 8192
"""Of a histogram from -1 to 1."""

ROUNDS: Final = 300


class Seen:
    """Keys and values of one layer so far."""

    def __init__(self, device: torch.device) -> None:
        self._keys = list[Tensor]()
        self._values = torch.zeros(BINS, dtype=torch.int64, device=device)

    def add(self, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rows [T, Hkv, D] of keys that cos and sin [T, D/2] have rotated, and of values."""
        self._keys.append(turned(k.float(), cos[:, None], -sin[:, None]).half())
        rows = v.half().float()
        self._values += histogram(rows, *middles(outliers_and_range(rows)[1]))

    def tables(self) -> dict[str, Tensor]:
        """The tensors of the layer, float32. Raises `NonFiniteError`."""
        keys = torch.cat(self._keys).float()  # [T, Hkv, D]
        if not bool(keys.isfinite().all()):
            raise NonFiniteError("a key of the text is not finite in FP16")
        ordered = keys.sort(0).values
        low = int(LEFT_ASIDE * (len(keys) - 1))
        span = torch.stack((ordered[low], ordered[-1 - low]))
        middle, reach = (each[..., 0] for each in middles(span.transpose(0, 1)))
        counts = {"k": histogram(keys, middle, reach), "v": self._values}
        poles = {
            f"{name}_poles_{bits}": means(each, 2**bits).float() for name, each in counts.items() for bits in WIDTHS
        }
        return {"k_range": span, **poles}


def gather_levels(model: Llama, windows: tuple[Ids, ...], on_tokens: OnTokens) -> dict[str, Tensor]:
    """The tensors of the file, by name. All keys of the windows are held in FP16 meanwhile. Raises `NonFiniteError`."""
    spec = model.spec
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=model.device)
    seen = [Seen(model.device) for _ in range(spec.num_layers)]

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        seen[layer].add(k, v, *turns_of(positions, frequencies))

    read(model, windows, see, on_tokens)
    found = {f"layers.{i}.{name}": tensor for i, each in enumerate(seen) for name, tensor in each.tables().items()}
    return {name: tensor.cpu().contiguous() for name, tensor in {"frequencies": frequencies, **found}.items()}


def histogram(x: Tensor, middle: Tensor, reach: Tensor) -> Tensor:
    """[BINS] int64: how many of (x - middle) / reach lie where between -1 and 1; those outside do not count."""
    x = ((x - middle) / reach).flatten()
    inside = x[x.abs() <= 1]  # and no NaN, of vectors without a reach
    return torch.bincount(((inside + 1) * (BINS / 2)).long().clamp(max=BINS - 1), minlength=BINS)


def means(counts: Tensor, groups: int) -> Tensor:
    """[groups] float64, ascending: what is nearest on average to the values that `counts` counted (Lloyd)."""
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
