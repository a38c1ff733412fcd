"""Second moments of q, k and v per layer and KV head from calibration text, and the weight of V's errors in W_o."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lab.frontier.core import CONTEXT, Model
from lab.frontier.quant import PAGE
from lab.frontier.store import cached, digest
from lab.frontier.texts import calibration
from measure.calibrate.moments import POSITION_STEP, rotated_back, spread

WINDOWS: Final = 4


@dataclass(frozen=True)
class Moments:
    """All are [layers, Hkv, D, D], except the means, [layers, Hkv, D]. k and q are those after RoPE."""

    qq: Tensor
    """E[q q^T] over the query heads of the group."""
    kk: Tensor
    """Second moment of k about its mean."""
    vv: Tensor
    """Second moment of v about its mean."""
    k_mean: Tensor
    v_mean: Tensor
    oo: Tensor
    """Sum over the group of Wo_h^T Wo_h."""


def spread_positions(x: Tensor, at: Tensor, cos_sin: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and second moment [H, D, D] of rows [H, T, D] as if each stood at every position below `reach`.

    The rows are those after RoPE at positions `at` [T]. One in `POSITION_STEP` positions stands for all.
    """
    x = rotated_back(x.transpose(0, 1).double(), cos_sin[at]).transpose(0, 1)
    cos, sin = cos_sin[:reach:POSITION_STEP].double().chunk(2, -1)
    mean, second = spread(x.mean(1), x.mT @ x / x.shape[1], cos, sin)
    return mean.float(), second.float()


def own_positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and second moment [H, D, D] of rows [H, T, D] at their own positions."""
    return x.mean(1), x.mT @ x / x.shape[1]


def gather(model: Model, windows: list[Tensor], reach: int) -> Moments:
    """Means and moments. The first page of each window is left out, since it holds attention sinks.

    `reach` is as in `spread_positions`; 0 leaves the rows at their own positions.
    """
    rows: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in model.layers]

    def watch(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        rows[layer].append((q[:, PAGE:].clone(), k[:, PAGE:].clone(), v[:, PAGE:].clone()))

    for ids in windows:
        model.hidden(ids, watch=watch)
    at = torch.cat([torch.arange(PAGE, len(ids)) for ids in windows])
    out: dict[str, list[Tensor]] = {field.name: [] for field in fields(Moments)}
    for w, seen in zip(model.layers, rows, strict=True):
        q, k, v = (torch.cat(x, 1) for x in zip(*seen, strict=True))
        (_, qq), (k_mean, kk) = (
            spread_positions(x, at, model.cos_sin, reach) if reach else own_positions(x) for x in (q, k)
        )
        v_mean, vv = own_positions(v)
        wo = w["o"].view(-1, model.hkv, model.hq // model.hkv, model.d)
        out["qq"].append(qq.unflatten(0, (model.hkv, -1)).mean(1))
        out["kk"].append(about_mean(k_mean, kk))
        out["vv"].append(about_mean(v_mean, vv))
        out["k_mean"].append(k_mean)
        out["v_mean"].append(v_mean)
        out["oo"].append(torch.einsum("nhgd,nhge->hde", wo, wo))
        seen.clear()
    return Moments(**{name: torch.stack(x) for name, x in out.items()})


def about_mean(mean: Tensor, second: Tensor) -> Tensor:
    """Covariance [H, D, D] from a mean and a second moment."""
    return second - mean[:, :, None] * mean[:, None]


def moments(model: Model, reach: int, cache: Path) -> Moments:
    """`gather` on the calibration text, cached in the folder `cache`."""
    windows = calibration(model.ids, WINDOWS)
    file = cache / f"moments-{reach}-{digest(windows)}.safetensors"
    return Moments(**cached(file, lambda: vars(gather(model, windows, reach))))


def both(model: Model, cache: Path) -> tuple[Moments, Moments]:
    """Moments at the windows' own positions, and at every position of the context."""
    return moments(model, 0, cache), moments(model, CONTEXT, cache)
