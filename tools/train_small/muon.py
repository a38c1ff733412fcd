"""Muon: momentum with updates that a Newton-Schulz iteration brings near an orthogonal matrix.

torch.optim.Muon does the same, one matrix at a time. Here all matrices of one shape are iterated together, which means
fewer and larger products. State and steps are those of torch.optim.Muon.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonal updates, decoupled weight decay; for matrices only."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[min(p.shape), max(p.shape)].append(p)
            for matrices in by_shape.values():
                self._update(matrices, group)

    def _update(self, matrices: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        wide = [p.shape[0] <= p.shape[1] for p in matrices]
        moved = [self._momentum(p, group["momentum"]) for p in matrices]
        stacked = torch.stack([m if w else m.mT for m, w in zip(moved, wide, strict=True)])
        for p, update, w in zip(matrices, orthogonal(stacked), wide, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            step = group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.add_(update if w else update.mT, alpha=-step)

    def _momentum(self, p: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Wide matrices with all singular values brought near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
