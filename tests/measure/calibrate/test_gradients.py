"""The pass that keeps a graph computes what the model that serves computes, and its gradients are those of its loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.exact import ExactKv, exact_attend
from hackkv.model.llama import Llama, flat_positions
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker
from measure.calibrate.gradients import LOSS_ROWS, read_gradients
from measure.calibrate.moments import LEFT_OUT, read

TOKENS = LOSS_ROWS + 50


@dataclass
class Shown:
    """K and V of one layer, with their positions and gradients."""

    k: Tensor
    v: Tensor
    positions: Tensor
    gradients: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = write_tiny(tmp_path_factory.mktemp("gradients"), Tiny(head_dim=64, max_context=512))
    return load_worker(ModelConfig(path=str(folder), dtype="float32"), CodecConfig(name="fp16")).model


def window(model: Llama) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(1).integers(0, model.spec.vocab, TOKENS)


def shown(model: Llama) -> list[Shown]:
    """The rows and gradients of each layer, first to last."""
    found, counted = list[Shown](), list[int]()
    read_gradients(
        model, (window(model),), lambda layer, k, v, at, of: found.append(Shown(k, v, at, of)), counted.append
    )
    assert counted == [TOKENS]
    return found[::-1]


def test_rows_are_those_of_the_model_that_serves(model: Llama) -> None:
    wanted: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(model.spec.num_layers)]
    read(model, (window(model),), lambda layer, q, k, v, at: wanted[layer].append((k, v, at)), lambda count: None)
    for layer, rows in zip(shown(model), wanted, strict=True):
        k, v, positions = (torch.cat(each) for each in zip(*rows, strict=True))
        assert torch.equal(layer.positions, positions)
        assert torch.allclose(layer.k, k, atol=1e-4)
        assert torch.allclose(layer.v, v, atol=1e-4)


@pytest.mark.parametrize("name", ["k", "v"])
def test_gradients_say_how_the_loss_moves(model: Llama, name: str) -> None:
    """Rows of the serving model are moved a little along a direction. Its loss changes as the gradient says."""
    for layer, each in enumerate(shown(model)):
        gradient = each.gradients[0 if name == "k" else 1]
        noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(layer))
        way = noise / noise.norm() + gradient / gradient.norm()
        step = 2e-2 / float(way.abs().max())
        up, down = (loss_with(model, layer, name, sign * step * way) for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(float((gradient * way).sum()), rel=0.05)


def loss_with(model: Llama, moved: int, name: str, by: Tensor) -> float:
    """The loss of the window if the last rows of K or V of a layer are moved by `by`."""
    ids = torch.from_numpy(window(model))
    exact = exact_attend([ExactKv()], [TOKENS])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == moved:
            rows = {"k": k.clone(), "v": v.clone()}
            rows[name][LEFT_OUT:] += by
            k, v = rows["k"], rows["v"]
        return exact(layer, q, k, v)

    with torch.inference_mode():
        hidden = model.forward(ids, flat_positions([(0, TOKENS)], model.device), attend)
        return float(F.cross_entropy(model.logits(hidden[:-1]).double(), ids[1:], reduction="sum"))
