"""`python -m bench.step [--out docs]`: how much of a decode step is not arithmetic.

The shipped model decodes a batch through the node's own loop: scheduler, engine thread, sampler, events and their
readers, in one process; gRPC is left out. A step lasts from the start of one to the start of the next. Every tenth is
recorded by torch's profiler: what of it lies outside torch's operators and the C++ kernels is Python. It is set against
a step that is not recorded, together with the time between two such steps, which is scheduling. Recording slows
operators more than what lies between them, so it does not flatter.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile

from bench.accuracy.machine import this_machine
from bench.cluster import load_note
from bench.sections import write_section
from decode_node.engine import DecodeEngine, Sequence, Work
from decode_node.scheduler import DecodeScheduler
from decode_node.steps import Steps, footprint
from decode_node.stream import Stream
from hackkv.codec import Span
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.model.worker import Worker, load_worker
from hackkv.pages import PagePool
from hackkv.types import DecodeJob, Request, Sampling, Token

PROMPT: Final = 1000
STEPS: Final = 300
RECORDED_EVERY: Final = 10
TARGET: Final = 0.25


@dataclass(slots=True)
class Times:
    """Seconds of each step that was not recorded, and of the recorded ones' parts outside operators and kernels."""

    steps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """From the end of a step to the start of the next."""
    python: list[float] = field(default_factory=list)
    calls: int = 0
    """Operators that Python calls, and kernels, in a step."""
    kernels_s: float = 0.0
    ended_at: float = 0.0


class TimedKernels:
    """The C++ kernels, each call timed."""

    def __init__(self, kernels: Any, times: Times) -> None:
        self._kernels = kernels
        self._times = times

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        return partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, kernel: Callable[..., Any], *args: Any) -> Any:
        began = perf_counter()
        result = kernel(*args)
        self._times.kernels_s += perf_counter() - began
        return result


def main() -> None:
    """Measure, print, and write the section if asked."""
    parser = argparse.ArgumentParser("python -m bench.step", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder whose performance.md and .json get this section")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    worker = load_worker(ModelConfig(threads=1), CodecConfig(name="hack"))
    measure(worker, arguments.batch)  # warm
    times = measure(worker, arguments.batch)
    step_s, between_s, python_s = median(times.steps), median(times.between), median(times.python)
    found = {
        "batch": arguments.batch,
        "step_ms": 1e3 * step_s,
        "between_ms": 1e3 * between_s,
        "python_ms": 1e3 * python_s,
        "share": (between_s + python_s) / step_s,
        "calls": times.calls,
    }
    text = section(worker, found)
    print(text)
    if arguments.out:
        write_section(arguments.out, "step", text, found)


def measure(worker: Worker, batch: int) -> Times:
    """Decode `STEPS` tokens for each of `batch` sequences."""
    times, step = Times(), DecodeEngine.step

    def timed(engine: DecodeEngine, works: list[Work]) -> list[Token | None]:
        began = perf_counter()
        gap = began - times.ended_at
        if len(times.steps) >= RECORDED_EVERY * (len(times.python) + 1):
            return _recorded(times, lambda: step(engine, works))
        tokens = step(engine, works)
        ended = perf_counter()
        times.steps.append(ended - began + gap)
        times.between.append(gap)
        times.ended_at = ended
        return tokens

    kernels: Any = worker.codec.kernels  # type: ignore[attr-defined]
    with (
        patch.object(DecodeEngine, "step", timed),
        patch.object(kernels, "_kernels", TimedKernels(kernels._kernels, times)),
    ):
        asyncio.run(_run(worker, batch))
    del times.steps[0], times.between[0]
    return times


def _recorded(times: Times, step: Callable[[], list[Token | None]]) -> list[Token | None]:
    with profile() as recording:
        kernels_s, began = times.kernels_s, perf_counter()
        tokens = step()
        whole_s = perf_counter() - began
        kernels_s = times.kernels_s - kernels_s
    outer = [event for event in recording.function_events if event.cpu_parent is None]
    times.calls = len(outer)
    times.python.append(whole_s - kernels_s - 1e-6 * sum(event.cpu_time_total for event in outer))
    times.ended_at = perf_counter()
    return tokens


async def _run(worker: Worker, batch: int) -> None:
    pages = batch * worker.layout.pages(PROMPT + STEPS)
    runner, pool = ModelRunner(worker.model, worker.codec, pages, batch), PagePool(pages, batch)
    scheduler: DecodeScheduler[Stream] = DecodeScheduler(
        pool, footprint(runner), host_bytes=0, max_batch=batch, replay_tokens=worker.layout.page_tokens
    )
    streams = [_landed(worker, runner, scheduler, nth) for nth in range(batch)]
    steps = Steps(runner, scheduler)
    readers = [asyncio.create_task(_read(stream)) for stream in streams]
    for stream in streams:
        steps.join(stream, Sequence([5], SamplerState(stream.job.request.sampling, (), ()), perf_counter()))
    await asyncio.gather(*readers)
    await steps.close()


def _landed(worker: Worker, runner: ModelRunner, scheduler: DecodeScheduler[Stream], nth: int) -> Stream:
    """A sequence whose prompt is in the cache."""
    generator = torch.Generator().manual_seed(nth)
    ids = torch.randint(10, worker.model.spec.vocab, (PROMPT,), generator=generator).tolist()
    sampling = Sampling(0, STEPS, temperature=0.0, ignore_eos=True)
    stream = Stream(DecodeJob(Request(str(nth), tuple(ids), sampling), str(nth), 0))
    stream.seat = scheduler.admit(stream, PROMPT, PROMPT + STEPS)
    assert stream.seat.grant is not None
    runner.forward([Span(stream.seat.grant.slot, 0, PROMPT, stream.seat.grant.pages)], ids, wanted=[0])
    return stream


async def _read(stream: Stream) -> None:
    async for _ in stream.events():
        pass


def section(worker: Worker, found: dict[str, Any]) -> str:
    """The page's section."""
    spec, machine = worker.model.spec, this_machine(worker.kernels, 1)
    shape = f"{worker.name}: {spec.num_layers} layers, hidden {spec.hidden}, {PROMPT} tokens each, one compute thread"
    lines = [
        "## Overhead of a decode step",
        "",
        f"`python -m bench.step --out docs` · {shape}; {machine.cpu}, {load_note()}",
        "",
        "| batch | step, ms | between steps, ms | Python within, ms | calls | Python and scheduling | target |",
        "|---|---|---|---|---|---|---|",
        f"| {found['batch']} | {found['step_ms']:.2f} | {found['between_ms']:.2f} | {found['python_ms']:.2f} "
        f"| {found['calls']} | {found['share']:.0%} | ≤ {TARGET:.0%} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
