"""Tests that need a GPU: captured graphs, steps begun ahead on real streams, and no waits of the host.

Without a GPU they are skipped. `test_graphs.py` and `tests/decode_node/test_ahead.py` test the same on a tape.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from hack_kernels.triton.backend import TritonBackend

from decode_node.engine import DecodeEngine, Sequence, StepPart
from hackkv.model.generate import generate
from hackkv.model.graphs import recordable
from hackkv.model.runner import ModelRunner
from hackkv.types import Token
from tests.decode_node.test_ahead import Schedule, requests
from tests.meta import META
from tests.on_triton import codec_on, served
from tests.pair import DECODING, PI, paired
from tests.standing import (
    PAGES,
    SLOTS,
    Runners,
    assert_same_pages,
    assert_same_rows,
    spans_of,
    states,
    worker_in_16_bits,
)

RECORDED = [name for name in served() if recordable(codec_on(TritonBackend(META), name), torch.bfloat16)]


def on_graphs(codec: str) -> Runners:
    """A runner with CUDA graphs, and one that enqueues each step."""
    worker = worker_in_16_bits(codec, PI, layers=2)
    recorded = ModelRunner(worker.model, worker.codec, PAGES, SLOTS, recorded=SLOTS)
    recorded.record()
    return Runners(recorded, ModelRunner(worker.model, worker.codec, PAGES, SLOTS))


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Let torch refuse operators that make the host wait for the device. Waits for events are allowed."""
    with warnings.catch_warnings(action="ignore"):  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("codec", RECORDED)
@torch.inference_mode()
def test_random_schedules_on_graphs_give_the_bytes_and_tokens_of_steps_enqueued_anew(codec: str) -> None:
    """Schedules have joins, leaves, full pages and swaps, and some steps are begun ahead."""
    both = on_graphs(codec)
    mine, its = (Schedule(runner, 3, 0.2, PI) for runner in (both.recorded, both.eager))
    assert mine.run(100) == its.run(100)
    assert mine.engine.foreseen > 0
    torch.cuda.synchronize()
    for one in mine.going:
        assert_same_rows(both, one.slot, both.eager.memory.footprint.runs(one.held))
    assert_same_pages(both)


@pytest.mark.parametrize("codec", ["rot-k3v2", "fp16", "hack"])
@torch.inference_mode()
def test_no_step_makes_the_host_wait(codec: str) -> None:
    """The host waits only for the event behind the tokens, also when a page fills, with and without graphs."""
    both = on_graphs(codec)
    for runner in (both.recorded, both.eager):
        engine = DecodeEngine(runner)
        going = [Sequence([7 + at], state, 0.0) for at, state in enumerate(states(3))]
        for rows in range(PI - 2, PI + 2):
            batch = zip(going, spans_of(rows, rows, rows), strict=True)
            parts = [StepPart(each, span, replay=False) for each, span in batch]
            if rows == PI - 2:
                engine.step(parts)  # allocates memory for all later steps
                continue
            with nobody_waits():
                found = engine.step(parts)
            assert all(isinstance(each, Token) for each in found)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("codec", ["rot-k3v2", "fp16"])
async def test_nodes_on_a_gpu_say_what_one_process_says(codec: str, backward: bool) -> None:
    """Requests go through wire, joins, full pages and swaps, on recorded steps with copies beside them."""
    worker = worker_in_16_bits(codec, PI, layers=2)
    asked = [replace(each, sampling=replace(each.sampling, max_tokens=60)) for each in requests(backward=backward)]
    expected = [generate(worker, request) for request in asked]
    async with paired(worker, num_pages=10, decoding=DECODING) as nodes:
        served = await asyncio.gather(*map(nodes.serve, asked))
        await nodes.assert_idle()
        foreseen = nodes.decode._steps._engine.foreseen
    assert backward or foreseen > 50
    assert [result.tokens for result in served] == expected
    assert sum(result.swaps for result in served) > 0
