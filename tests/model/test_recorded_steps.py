"""Decode steps that the CPU has recorded (`hackkv.model.graphs`) give the bytes and tokens of steps that are computed
operator by operator, for any codec, batch and length."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import compiled
from torch import Tensor

from hackkv.batch import Span
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.errors import NonFiniteError
from hackkv.model.graphs import recordable
from hackkv.model.llama import Llama, Weights
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from tests.codecs.calibrations import calibration_file
from tests.meta import placed
from tests.model.test_placement import EVERY
from tests.pair import PI, greedy, prompt, tiny_worker

SLOTS = 3
EACH = 3
"""Pages of a sequence."""
UNRECORDED = {"mpcache", "cachegen-fp16", "cachegen-delta", "toy-int8"}
"""Codecs that choose pages, or have pages that their definition serves."""
ANEW = {"zack", "rot-exact-layer"}
"""Codecs for which torch computes in a step: it cuts off dropped channels, or copies the open pages of a layer that is
left exact under a window."""


def runners(name: str, dtype: torch.dtype, **settings: Any) -> tuple[ModelRunner, ModelRunner]:
    """A runner that records and one that does not, of the same model."""
    model, backend = tiny_worker("fp16").model, CpuBackend()
    shape = model.spec.kv_shape
    if "calibration" in settings:
        settings["calibration"] = str(calibration_file(shape.num_layers, shape.num_kv_heads, shape.head_dim))
    config = CodecConfig(name=name, settings={"page_tokens": PI, **settings})
    codec = make_codec(config, shape, backend)
    weights: Weights = placed(model.weights, model.device, dtype)
    llama = Llama(model.spec, weights, kernels=backend.rows)
    recorded, eager = (ModelRunner(llama, codec, SLOTS * EACH, SLOTS, recorded=most) for most in (SLOTS, 0))
    recorded.record()
    return recorded, eager


def span(slot: int, held: int, count: int = 1) -> Span:
    return Span(slot, held, count, tuple(range(slot * EACH, (slot + 1) * EACH)))


def step(runner: ModelRunner, spans: list[Span], ids: list[int]) -> list[int]:
    """Run a step; return the tokens after `ids`."""
    sampling, kernels = greedy("r", (5,), 99, ignore_eos=True).sampling, runner.model.kernels
    states = [SamplerState(sampling, (5,), (), kernels=kernels) for _ in spans]
    return [token.token_id for token in runner.choose(spans, ids, states)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def programs(runner: ModelRunner) -> list[object]:
    """The programs that run in place of recorded steps."""
    assert runner._graphs is not None
    return list(runner._graphs._steps.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "settings"), EVERY, ids=str)
def test_a_step_made_again_gives_the_bytes_of_one_computed_anew(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Sequences join, leave and fill pages. A batch size comes back after others have run in the same memory."""
    both = runners(name, dtype, **settings)
    held = [PI - 2, 5, 2 * PI - 3]
    for runner in both:
        for slot, rows in enumerate(held):
            runner.forward([span(slot, 0, rows)], prompt(slot, rows), wanted=[0])
    steps = [[0], [0, 1, 2], [2, 0], [1], [0, 1, 2], [2], [0, 2], [1, 0, 2]]
    tokens = [7, 8, 9]
    for slots in steps:
        ids = [tokens[slot] for slot in slots]
        found, expected = (step(runner, [span(slot, held[slot]) for slot in slots], ids) for runner in both)
        assert found == expected
        for slot, token in zip(slots, found, strict=True):
            held[slot] += 1
            tokens[slot] = token
    for mine, its in zip(*(runner.memory.pools for runner in both), strict=True):
        assert mine.num_pages == its.num_pages, "none is spare"
        for plane, values in its.planes.items():
            assert torch.equal(bits(mine.planes[plane]), bits(values)), plane
        assert torch.equal(bits(mine.open_k), bits(its.open_k))
        assert torch.equal(bits(mine.open_v), bits(its.open_v))
    if recordable(both[0].codec, dtype, queues=False):
        assert len(programs(both[0])) == 3, "one for each number of sequences"
        kinds = {isinstance(each, compiled().Program) for each in programs(both[0])}
        assert kinds == {name not in ANEW}, "whether torch computed in a step"
    else:
        assert name in UNRECORDED or "open_page" in settings


def test_a_faulty_sequence_is_named_and_leaves_no_row() -> None:
    """The other sequences advance."""
    both = runners("rot-k3v2", torch.float32)
    for runner in both:
        embed = runner.model.weights.embed
        assert isinstance(embed, Tensor)
        before = runner.memory.pools[0].open_k[1].clone()
        embed[9] = torch.nan
        with pytest.raises(NonFiniteError, match="layer 0: K is nan at token 3, KV head 0") as error:
            step(runner, [span(0, 5), span(1, 3), span(2, 6)], [7, 9, 8])
        assert error.value.span == 1
        assert torch.equal(runner.memory.pools[0].open_k[1], before)
        embed[9] = 0
    rows = [runner.memory.pools[1].open_k for runner in both]
    assert torch.equal(rows[0][2, :, 6], rows[1][2, :, 6])
    assert rows[0][2, :, 6].any(), "sequence 2 has its row"
    found, expected = (step(runner, [span(1, 3)], [8]) for runner in both)
    assert found == expected, "the fault is gone with its token"


def test_a_step_in_which_torch_computes_is_computed_anew_each_time() -> None:
    """This also holds if the library multiplies. Only the gain in speed is lost."""
    recorded, eager = runners("fp16", torch.float32)
    recorded.model.library_rows = 2
    for held in (0, 1, 2):
        found, expected = (step(runner, [span(0, held), span(1, held)], [7, 8]) for runner in (recorded, eager))
        assert found == expected
        step(recorded, [span(2, held)], [9])
    assert recorded._graphs is not None
    kinds = {size: isinstance(step, compiled().Program) for size, step in recorded._graphs._steps.items()}
    assert kinds == {1: True, 2: False}


def test_the_time_in_attention_is_counted_when_a_step_is_made_again() -> None:
    recorded, _ = runners("rot-k3v2", torch.float32)
    seen = [recorded.codec.attend_s]
    for held in range(3):
        step(recorded, [span(0, held)], [7])
        seen.append(recorded.codec.attend_s)
    assert all(later > earlier for earlier, later in pairwise(seen))
