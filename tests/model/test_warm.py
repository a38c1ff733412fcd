"""All kernels that serving launches, for batches and prompts of any size, are compiled before a port opens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("triton")

from hack_kernels.triton.launch import Launch
from hack_kernels.triton.split import LARGE_BATCH, batch_block, block_sizes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.warm import call_all
from hackkv.model.worker import Worker, load_worker
from tests.on_triton import compiled_for, served
from tests.pair import PI, greedy, paired, prompt, tiny_worker

MOST = 8
"""The most sequences of a batch."""


@cache
def worker_in_bf16(codec: str) -> Worker:
    """A worker in BF16, as on a GPU, for which FP16 pages have a kernel too."""
    with TemporaryDirectory() as folder:
        path = write_tiny(Path(folder), Tiny(layers=1, max_context=1024))
        model = ModelConfig(path=str(path), dtype="bfloat16", backend="triton")
        return load_worker(model, CodecConfig(name=codec, settings={"page_tokens": PI}))


@contextmanager
def compiling() -> Iterator[set[object]]:
    """Collect the keys for which Triton would compile. Kernels do not run, and outputs are zeros."""
    compiled = set[object]()

    def note(launch: Launch) -> None:
        compiled.add(compiled_for(launch))
        if isinstance(out := launch.arguments.get("out"), Tensor):
            out.zero_()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Launch, "run", note)
        yield compiled


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", served())
async def test_serving_compiles_nothing_after_the_warm_up(codec: str) -> None:
    """Requests of random lengths run alone and at once, through both nodes, with swaps: three have room for their
    prompts but not for their answers."""
    worker, chance = worker_in_bf16(codec), random.Random(codec)
    with compiling() as warmed:
        call_all(worker, block_sizes(MOST))
    with compiling() as compiled:
        async with paired(worker, num_pages=20, timeout_s=600.0) as nodes:
            sizes = [PI, 2 * PI + 1, *(chance.randrange(1, 5 * PI) for _ in range(6))]
            requests = [greedy(f"r{i}", prompt(i, size), PI + 3, ignore_eos=True) for i, size in enumerate(sizes)]
            for request in requests[:2]:
                await nodes.serve(request)
            await asyncio.gather(*map(nodes.serve, requests[2:]))
            await nodes.assert_idle()
    assert compiled <= warmed
    assert compiled


def test_what_the_warm_up_leaves_out_would_be_seen() -> None:
    """This proves that the test above can fail: one sequence has other kernels than two."""
    worker = worker_in_bf16("hack")
    sets = list[set[object]]()
    for size in (1, 2):
        with compiling() as compiled:
            call_all(worker, [size])
        sets.append(compiled)
    assert not sets[0] <= sets[1]
    assert not sets[1] <= sets[0]


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k3v2", "mpcache", "kvcomp"])
def test_a_warm_up_leaves_answers_as_they_were(codec: str) -> None:
    """Kernels run here, for every kind of codec: exact pages, votes, choices, varying sizes."""
    check_answers(tiny_worker(codec), [1, 2, 3])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["hack", "rot-k3v2"])
def test_a_warm_up_on_triton_leaves_answers_as_they_were(codec: str) -> None:
    check_answers(tiny_worker(codec, layers=1, backend="triton"), [1, 2])


def check_answers(worker: Worker, sizes: list[int]) -> None:
    """A request has the same answer before and after a warm-up."""
    request = greedy("r", prompt(0, PI + 1), 3, ignore_eos=True)
    before = generate(worker, request)
    call_all(worker, sizes)
    assert generate(worker, request) == before


def test_on_the_processor_nothing_is_compiled() -> None:
    assert worker_in_bf16("hack").backend.compiler is None


@given(most=st.integers(1, 5 * LARGE_BATCH), batch=st.integers(1, 5 * LARGE_BATCH))
def test_every_batch_runs_the_kernels_of_one_that_is_warmed(most: int, batch: int) -> None:
    sizes = block_sizes(most)
    assert all(1 <= size <= most for size in sizes)
    assert len({batch_block(size) for size in sizes}) == len(sizes)
    assert batch > most or batch_block(batch) in {batch_block(size) for size in sizes}


def test_a_batch_larger_than_its_slots_is_warmed_too() -> None:
    worker = worker_in_bf16("hack")
    with compiling() as compiled:
        call_all(worker, [LARGE_BATCH + 1])
    assert compiled
