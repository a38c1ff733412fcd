"""python -m lab.frontier.proxy: a fast stand-in, the KL of attention itself when only K is quantized, by layer.

Inputs of every layer are exact. 256 queries of the second half are sampled; each sees one sink page and one recent page
exactly.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from hack_kernels.level_format import REFITS, STRETCH
from torch import Tensor

from lab.frontier.calib import Moments, both
from lab.frontier.core import Model
from lab.frontier.formats import basis, components, rotated
from lab.frontier.lattice import Vectors, d4, e8
from lab.frontier.quant import PAGE, Channel, Quantizer
from lab.frontier.store import add_cache, cached, digest
from lab.frontier.texts import SCORED

QUERIES: Final = 256


class Proxy:
    """Sampled q and all k of every layer of a window."""

    def __init__(self, model: Model, window: str, cache: Path) -> None:
        ids = SCORED[window].ids(model.ids)
        tokens = len(ids)
        at = torch.arange(tokens // 2, tokens, tokens // 2 // QUERIES)
        self._rows = cached(cache / f"proxy-{digest([ids])}.safetensors", lambda: rows_of(model, ids, at))
        keys = torch.arange(tokens)
        self._future = keys[None] > at[:, None]
        self._quantized = (keys[None] // PAGE < at[:, None] // PAGE - 1) & (keys[None] >= PAGE)

    @torch.inference_mode()
    def loss(self, quantize: Quantizer, layer: int) -> float:
        """Mean KL(p exact || p quantized) in nats."""
        q, k = self._rows[f"{layer}.q"], self._rows[f"{layer}.k"]
        q = q.unflatten(0, (k.shape[0], -1)) / math.sqrt(k.shape[-1])
        scores = (q @ k[:, None].mT).masked_fill(self._future, -torch.inf)
        change = (q @ (quantize(layer, k) - k)[:, None].mT) * self._quantized
        p, r = scores.log_softmax(-1), (scores + change).log_softmax(-1)
        kl: float = (p.exp() * (p - r)).nan_to_num(0).sum(-1).mean().item()
        return kl


def rows_of(model: Model, ids: Tensor, at: Tensor) -> dict[str, Tensor]:
    """q at positions `at` and k of every layer."""
    found = dict[str, Tensor]()

    def watch(layer: int, q: Tensor, k: Tensor, _: Tensor) -> None:
        found[f"{layer}.q"], found[f"{layer}.k"] = q[:, at].clone(), k.clone()

    model.hidden(ids, watch=watch)
    return found


def variants(own: Moments, every: Moments, bits: int) -> Mapping[str, Quantizer]:
    """Name -> the variant of the quantizer."""
    second = every.kk + every.k_mean[..., None] * every.k_mean[..., None, :]
    found: dict[str, Quantizer] = {"rotated": rotated(bits, every.kk.shape[-1]), "channel": Channel(bits)}
    full = basis(every.kk, every.qq, every.k_mean).tok(bits)
    return (
        found
        | {
            "all": full,
            "own positions": basis(own.kk, own.qq, own.k_mean).tok(bits),
            "no mean": replace(basis(second, every.qq, every.k_mean).tok(bits), mean=None),
            "C^0": basis(every.kk, every.qq, every.k_mean, alpha=0).tok(bits),
            "C^(-3/8)": basis(every.kk, every.qq, every.k_mean, alpha=0.75).tok(bits),
            "damping 0.03": basis(every.kk, every.qq, every.k_mean, damp=0.03).tok(bits),
            "no feedback": replace(full, feedback=None),
            "no refits": replace(full, passes=0),
            "as sealed": replace(full, passes=REFITS, stretch=STRETCH[bits]),
            "descent": replace(full, sweeps=1),
            "FP8 scale": replace(full, fp8_scale=True),
        }
        | (vectors(every) if bits == 2 else {})
    )


def vectors(every: Moments) -> dict[str, Quantizer]:
    """Codes of vectors, with and without feedback, and separate principal components."""
    b = basis(every.kk, every.qq, every.k_mean)
    found = dict[str, Quantizer]()
    for name, lattice in (("D4", d4()), ("E8", e8())):
        fed = Vectors(lattice, b.to, b.back, b.mean, b.feedback)
        found |= {name: fed, f"{name}, no feedback": replace(fed, feedback=None)}
    found |= {f"{n} components": components(every.kk, every.qq, every.k_mean, n, 2) for n in (4, 8)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the mean and each layer's loss of every variant."""
    parser = argparse.ArgumentParser(prog="python -m lab.frontier.proxy", description=__doc__)
    parser.add_argument("--window", choices=sorted(SCORED), default="data")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 7, 13, 19, 25], metavar="N")
    parser.add_argument("--threads", type=int, default=1)
    add_cache(parser)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model = Model()
    proxy = Proxy(model, args.window, args.cache)
    for name, quantize in variants(*both(model, args.cache), args.bits).items():
        losses = [proxy.loss(quantize, layer) for layer in args.layers]
        print(f"{name:16} {sum(losses) / len(losses):.5f} ", *(f"{x:.4f}" for x in losses), flush=True)


if __name__ == "__main__":
    main()
