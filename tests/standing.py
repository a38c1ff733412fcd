"""A node of 16-bit weights on the Triton backend without launches, which a tape can record and replay quickly.

Decode over FP16 rows is a stand-in in torch. Like Triton's kernel, it reads no values on the host. Operations on rows
are their definitions. This module needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.block_weight import BlockWeight, Weight
from hack_kernels.device_choosing import DeviceRows
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.triton import backend
from hack_kernels.triton.backend import TritonRows
from torch import Tensor

from hackkv.batch import Span
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from tests.pair import greedy
from tests.tape import TapeRecorder, on_tape

SLOTS = 5
PAGES = 24
SMALL = 8
"""Rows of a page for tests in which no kernel of Triton has to support the size."""


class InvariantProducts:
    """Products of a row that do not depend on other rows, so that padded batches give exactly the same tokens."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert not isinstance(weight, BlockWeight)
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


class InvariantRows(InvariantProducts, TritonRows):
    """The backend's row kernels with these products."""


class PlainInvariantRows(InvariantProducts, DeviceRows):
    """Row kernels in torch with these products."""


class StandingRows(RowReference):
    """Row kernels whose decode reads all pages of the table and masks rows that the sequence does not hold."""

    served_by = "triton"

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        if rows.k is not None:
            return super().attend(layer, pool, spans, rows)
        pi, heads, starts = self.fmt.page_tokens, pool.num_kv_heads, spans.starts[:, None]
        sealed = torch.arange(spans.table.shape[1] * pi) < starts // pi * pi
        seen = torch.cat((sealed, torch.arange(pi) <= starts % pi), dim=1)[:, None, :, None]
        keys, values = (
            torch.cat((plane[spans.table].transpose(1, 2).flatten(2, 3), exact[spans.slots]), 2).double()
            for plane, exact in ((pool.planes["k"], pool.open_k), (pool.planes["v"], pool.open_v))
        )
        q = rows.q.double().unflatten(1, (heads, -1)) / math.sqrt(rows.q.shape[2])
        scores = (keys.masked_fill(~seen, 0) @ q.mT).masked_fill(~seen, -math.inf)
        out = scores.softmax(2).mT @ values.masked_fill(~seen, 0)
        return torch.flatten(out, 1, 2).to(rows.q.dtype)


@contextmanager
def standing() -> Iterator[None]:
    """Let codecs over FP16 rows compute with the stand-in, and operations between products run without launches."""
    with pytest.MonkeyPatch.context() as patched:
        formats: dict[Any, Any] = backend.FORMATS
        patched.setitem(formats, RowFormat, lambda fmt, made: StandingRows(fmt, made.device))
        patched.setattr(backend, "TritonRows", DeviceRows)
        yield


def worker_in_16_bits(codec: str, page_tokens: int, layers: int = 1) -> Worker:
    """A worker with a tiny model in bfloat16."""
    with TemporaryDirectory() as folder:
        tiny = Tiny(layers=layers, hidden=64, heads=2, kv_heads=1, ffn=64, max_context=1024)
        path = write_tiny(Path(folder), tiny)
        model = ModelConfig(path=str(path), dtype="bfloat16", backend="triton")
        found = load_worker(model, CodecConfig(name=codec, settings={"page_tokens": page_tokens}))
    kernels = InvariantRows() if isinstance(found.backend.rows, TritonRows) else PlainInvariantRows()
    llama = Llama(found.model.spec, found.model.weights, kernels=kernels)
    return replace(found, model=llama)


@dataclass
class Runners:
    """A runner that replays recorded steps, and one that enqueues each step."""

    recorded: ModelRunner
    eager: ModelRunner
    recorder: TapeRecorder = field(default_factory=TapeRecorder)
    """The recorder whose tapes stand in for graphs."""


def runners(codec: str, page_tokens: int, most: int, layers: int = 1) -> Runners:
    worker = worker_in_16_bits(codec, page_tokens, layers)
    with on_tape() as recorder:
        recorded = ModelRunner(worker.model, worker.codec, PAGES, SLOTS, recorded=most)
        recorded.record()
    return Runners(recorded, ModelRunner(worker.model, worker.codec, PAGES, SLOTS), recorder)


def spans_of(*held: int, pages: int = 2) -> list[Span]:
    return [Span(slot, rows, 1, tuple(range(slot * pages, (slot + 1) * pages))) for slot, rows in enumerate(held)]


def states(count: int) -> list[SamplerState]:
    return [SamplerState(greedy("r", (5,), 99, ignore_eos=True).sampling, (5,), ()) for _ in range(count)]


def assert_same_pages(both: Runners) -> None:
    """Assert that all pages that sequences can hold are equal."""
    for found, expected in zip(both.recorded.memory.pools, both.eager.memory.pools, strict=True):
        for name, plane in expected.planes.items():
            assert torch.equal(_bits(found.planes[name][:PAGES]), _bits(plane)), name


def assert_same_rows(both: Runners, slot: int, runs: Iterable[slice]) -> None:
    """Assert that rows `runs` of a slot are equal."""
    for found, expected in zip(both.recorded.memory.pools, both.eager.memory.pools, strict=True):
        for run in runs:
            assert torch.equal(_bits(found.open_k[slot, :, run]), _bits(expected.open_k[slot, :, run]))
            assert torch.equal(_bits(found.open_v[slot, :, run]), _bits(expected.open_v[slot, :, run]))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
