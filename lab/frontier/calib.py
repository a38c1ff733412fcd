"""Second moments of q, k and v per layer and KV head from calibration text, and of V's use from the weights alone."""

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
    """All [layers, Hkv, D, D] but the means, [layers, Hkv, D]; k and q as they are after RoPE."""

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
    """Mean [H, D] and second moment [H, D, D] that rows [H, T, D] had if each stood at every position below `reach`.

    The rows are those after RoPE at positions `at` [T]; every seventh position stands for all.
    """
    x = rotated_back(x.transpose(0, 1).double(), cos_sin[at]).transpose(0, 1)
    cos, sin = cos_sin[:reach:POSITION_STEP].double().chunk(2, -1)
    mean, second = spread(x.mean(1), x.mT @ x / x.shape[1], cos, sin)
    return mean.float(), second.float()


def own_positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and second moment [H, D, D] of rows [H, T, D] as they are."""
    return x.mean(1), x.mT @ x / x.shape[1]


def gather(model: Model, windows: list[Tensor], reach: int) -> Moments:
    """Means and moments; the first page of a window is left out, as a sink is.

    `reach` as in `spread_positions`; 0 leaves the rows at their own positions.
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
    """The covariance [H, D, D]."""
    return second - mean[:, :, None] * mean[:, None]


def moments(model: Model, reach: int, cache: Path) -> Moments:
    """`gather` of the calibration's text, kept in the folder `cache`."""
    windows = calibration(model.ids, WINDOWS)
    file = cache / f"moments-{reach}-{digest(windows)}.safetensors"
    return Moments(**cached(file, lambda: vars(gather(model, windows, reach))))


def both(model: Model, cache: Path) -> tuple[Moments, Moments]:
    """Of the windows' own positions, and of every position of the context."""
    return moments(model, 0, cache), moments(model, CONTEXT, cache)
