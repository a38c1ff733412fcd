"""From moments to the tensors of the codecs `rot-*`: a basis for K, its mean, and gains of the feedback inside a row.

Codes of one scale want channels that look alike, so K is whitened and then spread by a Hadamard matrix. Whitening it
wholly would spend precision on directions that no query has, so the exponent is -1/4 and not -1/2. The error to
minimize is that of q·k: e^T E[q q^T] e for an error e of k. Feedback minimizes it in the basis T, where E[q q^T] is
M = T^-1 Q T^-T. With M = R^T R, the levels of a row are chosen from the last channel on, and every channel makes up for
the errors of those after it (LDLQ of QuIP, arXiv 2307.13304). The rows of R, divided by their diagonal, are the gains.
The squares of the diagonal weigh the errors that are left when a row's scale is fitted.
"""

from __future__ import annotations

from typing import Final

import torch
from hack_kernels.level_format import Feedback, on_grid
from torch import Tensor

from hackkv.codecs.hadamard import hadamard
from measure.calibrate.moments import Moments

POWER: Final = -0.25
FLOOR: Final = 1e-3
"""The least eigenvalue of the covariance, relative to their mean: the text has no rows in some directions."""
DAMP: Final = 0.1
"""Share of its mean that is added to M's diagonal: the queries to come are not those of the text."""


def solve(moments: Moments) -> dict[str, Tensor]:
    """`basis` and `gains` [Hkv, D, D], `mean` and `weights` [Hkv, D] of a layer, float32 on the processor."""
    covariance, queries = moments.covariance.cpu(), moments.queries.cpu()
    basis = power(covariance, POWER) @ hadamard(covariance.shape[-1])
    # The gains must fit the basis that is stored, so the metric is that of the rounded basis.
    stored = basis.float()
    back = torch.linalg.inv(stored.double())
    feedback = feedback_by(back @ queries @ back.mT)
    found = {"basis": stored, "mean": moments.mean.cpu().float(), "gains": feedback.gains, "weights": feedback.weights}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def power(covariance: Tensor, exponent: float) -> Tensor:
    """Symmetric [..., D, D] float64 to a power; eigenvalues are scaled to a mean of 1 and floored."""
    values, vectors = torch.linalg.eigh(covariance)
    mean = values.mean(-1, keepdim=True)
    values = (values / torch.where(mean > 0, mean, 1)).clamp(min=FLOOR)
    powered: Tensor = vectors * values.pow(exponent)[..., None, :] @ vectors.mT
    return powered


def feedback_by(metric: Tensor) -> Feedback:
    """Gains g_di = R_di / R_dd above the diagonal, and weights R_dd², of metric [heads, D, D] + damping = R^T R.

    R is upper triangular. Weights have a mean of 1 in every head.
    """
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damped = metric + DAMP * torch.where(mean > 0, mean, 1) * torch.eye(metric.shape[-1], dtype=metric.dtype)
    root: Tensor = torch.linalg.cholesky(damped, upper=True)
    diagonal = root.diagonal(dim1=-2, dim2=-1)
    weights = diagonal.square() / diagonal.square().mean(-1, keepdim=True)
    return Feedback(on_grid((root / diagonal[..., None]).triu(1).float()), weights.float())
