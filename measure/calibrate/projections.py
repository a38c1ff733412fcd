"""From moments to the tensors of codec `zack`: rotations by which its channels are sorted (ZACK, §4.3).

For each KV head, A_qk stacks K and the Q of its query heads, as rows [., D]. A_vw stacks V and the columns of the query
heads' slices of W_o. A = U Σ R^T follows from the Gram matrix A^T A = R Σ² R^T, so no row is kept. Rows of Q and K are
taken at all positions of the context, as for `rot-*` (`moments.py`). The paper takes them at the positions of its text.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hackkv.codecs.zack import SIDES
from measure.calibrate.moments import Moments

ROUNDING: Final = 1e-12
"""Eigenvalues of a Gram matrix below this share of the largest are rounding errors of 0."""


def project(moments: Moments, rows: int, out: Tensor) -> dict[str, Tensor]:
    """R [Hkv, D, D] and singular values [Hkv, D] of both sides of a layer, by name, float32 on the processor.

    `rows` is the number of rows of the text that counted; `out` [hidden, Hq * D] is W_o.
    """
    heads, dim = moments.mean.shape
    slices = out.detach().cpu().double().unflatten(1, (heads, -1, dim)).permute(1, 0, 2, 3).flatten(1, 2)
    group = slices.shape[1] // out.shape[0]
    keys = moments.covariance + moments.mean[:, :, None] * moments.mean[:, None]
    grams = (
        rows * (group * moments.queries + keys).cpu(),
        rows * moments.values.cpu() + slices.mT @ slices,
    )
    found = dict[str, Tensor]()
    for side, gram in zip(SIDES, grams, strict=True):
        squares, vectors = torch.linalg.eigh(gram)  # smallest first
        squares, vectors = squares.flip(-1), vectors.flip(-1)
        squares = torch.where(squares > ROUNDING * squares[:, :1], squares, 0)
        found[side], found[f"{side}_values"] = vectors.float().contiguous(), squares.sqrt().float()
    return found
