"""`python -m bench.step [--model smollm2 --codec rot-k3v2 --batch 1] [--out docs]`: how much of a decode step is not
arithmetic.

The model, by default the shipped one, decodes a batch through the node's own loop: scheduler, engine thread, sampler,
events and their readers, in one process. gRPC is left out. A step lasts from the end of the one before to its own end.

torch's profiler watches some steps in a row. Time of a watched step outside torch's operators and the C++ kernels
counts as Python, which includes the cost of watching. The reported share is this Python time plus the time between two
steps (scheduling), over the time of a step that is not watched. The cost of watching can only raise the share. The
first watched step is left out, since the profiler's start has emptied the caches.

The node records its steps (`hackkv.model.graphs`), so a step calls one kernel for the whole model. `--eager` measures
steps that are not recorded.

Tokens are chosen greedily, and in a second run with the sampling that the model proposes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import torch
from hack_kernels.recorder import Recorder
from torch.autograd.profiler import profile, record_function

from bench.cluster import load_note
from bench.environment import as_a_role
from bench.sections import write_section
from decode_node.engine import DecodeEngine, Outcome, Sequence, StepPart
from decode_node.kept_rows import KeptRows
from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from decode_node.steps import Steps
from decode_node.stream import Stream
from hackkv.batch import Span
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.model.worker import Worker, load_worker
from hackkv.packaged import SHIPPED
from hackkv.types import DecodeJob, Request, Sampling
from measure.accuracy.machine import this_machine
from router.api.defaults import read_sampling_defaults

PROMPT: Final = 1000
STEPS: Final = 300
WATCHED: Final = range(STEPS // 2, STEPS // 2 + 31)
"""Steps that the profiler watches. The first of them only warms up."""
TARGET: Final = 0.20
GREEDY: Final = Sampling(seed=0, max_tokens=STEPS, temperature=0.0, ignore_eos=True)
STEP: Final = "decode step"

Step = Callable[[DecodeEngine, list[StepPart]], list[Outcome]]


@dataclass(slots=True)
class Times:
    """Times in seconds: `steps` that were not watched, and `python`, watched steps without operators and kernels."""

    steps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Times from the end of a step to the start of the next."""
    python: list[float] = field(default_factory=list)
    operators: int = 0
    """Calls of torch's operators in a step, without those inside other operators."""
    kernels: int = 0
    """Calls of C++ kernels in a step."""


def summary(times: Times, batch: int, sampling: str) -> dict[str, Any]:
    """Medians in milliseconds, and the share of a step that is Python and scheduling."""
    step_s, between_s, python_s = median(times.steps), median(times.between), median(times.python)
    return {
        "sampling": sampling,
        "batch": batch,
        "step_ms": 1e3 * step_s,
        "between_ms": 1e3 * between_s,
        "python_ms": 1e3 * python_s,
        "share": (between_s + python_s) / step_s,
        "operators": times.operators,
        "kernels": times.kernels,
    }


class TimedKernels:
    """The C++ kernels with a timer around each call."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seconds = 0.0
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        if not callable(attribute):
            return attribute
        made = self.timed(attribute)
        setattr(self, name, made)  # later look-ups find it without `__getattr__`
        return made

    def timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """`kernel` with a timer around each call."""
        return partial(self._call, kernel)

    def _call(self, kernel: Callable[..., Any], *args: Any) -> Any:
        began = perf_counter()
        result = kernel(*args)
        self.seconds += perf_counter() - began
        self.calls += 1
        return result


class TimedRecorder:
    """A `Recorder` whose recorded work counts as a kernel."""

    queues = False

    def __init__(self, inner: Recorder, kernels: TimedKernels) -> None:
        self._inner, self._kernels = inner, kernels

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work. If that is not possible, the work itself is returned: its kernels are timed anyway."""
        made = self._inner.record(work)
        return made if made is work else self._kernels.timed(made)


class Clock:
    """Stands in for `DecodeEngine.step` and times it. All methods run on the engine's thread."""

    def __init__(self, step: Step, kernels: TimedKernels) -> None:
        self.times = Times()
        self._step = step
        self._kernels = kernels
        self._steps = 0
        self._ended_at = 0.0
        self._watch = profile()
        self._kernel_s: list[float] = []

    def step(self, engine: DecodeEngine, parts: list[StepPart]) -> list[Outcome]:
        """Take one step, watched or not."""
        nth = self._steps
        self._steps += 1
        if nth not in WATCHED:
            return self._timed(engine, parts, alone=nth - 1 in WATCHED or nth == 0)
        if nth == WATCHED.start:
            self._watch.__enter__()
        before, calls = self._kernels.seconds, self._kernels.calls
        with record_function(STEP):
            tokens = self._step(engine, parts)
        self._kernel_s.append(self._kernels.seconds - before)
        self.times.kernels = self._kernels.calls - calls
        if nth == WATCHED[-1]:
            self._watch.__exit__(None, None, None)
            self._read()
        return tokens

    def _timed(self, engine: DecodeEngine, parts: list[StepPart], *, alone: bool) -> list[Outcome]:
        """Take one step that is not watched. `alone`: the step before was watched, or there was none."""
        began = perf_counter()
        tokens = self._step(engine, parts)
        ended = perf_counter()
        if not alone:
            self.times.steps.append(ended - self._ended_at)
            self.times.between.append(began - self._ended_at)
        self._ended_at = ended
        return tokens

    def _read(self) -> None:
        events = self._watch.function_events
        steps = [event for event in events if event.name == STEP]
        inner = [event for event in events if event.cpu_parent is not None and event.cpu_parent.name == STEP]
        self.times.operators = len(inner) // len(steps)
        for step, kernel_s in list(zip(steps, self._kernel_s, strict=True))[1:]:
            operator_us = sum(event.cpu_time_total for event in inner if event.cpu_parent is step)
            self.times.python.append(1e-6 * (step.cpu_time_total - operator_us) - kernel_s)


def main() -> None:
    """Measure, print, and write the section if asked."""
    parser = argparse.ArgumentParser("python -m bench.step", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder whose performance.md and .json get this section")
    parser.add_argument("--model", default="", help="as for hackkv serve; default: the shipped model")
    parser.add_argument("--codec", default="hack")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="steps are not recorded")
    arguments = parser.parse_args()
    # The quality of the tokens does not matter here.
    codec = CodecConfig(name=arguments.codec, allow_loss=True)
    worker = load_worker(ModelConfig(path=arguments.model, threads=arguments.threads), codec)
    once = partial(measure, worker, arguments.batch, recorded=not arguments.eager)
    once(GREEDY)  # warm
    samplings = {"greedy": GREEDY}
    if not arguments.model:
        samplings["as the model proposes"] = proposed(SHIPPED)
    found = [summary(once(sampling), arguments.batch, name) for name, sampling in samplings.items()]
    said = " ".join(("python -m bench.step", *sys.argv[1:]))
    text = section(worker, found, said)
    print(text)
    if arguments.out:
        write_section(arguments.out, f"step-{worker.name}" if arguments.model else "step", text, found)


def proposed(folder: Path) -> Sampling:
    """The sampling that the checkpoint in `folder` proposes for requests without parameters."""
    return replace(GREEDY, **read_sampling_defaults(folder).model_dump())


def measure(worker: Worker, batch: int, sampling: Sampling, *, recorded: bool) -> Times:
    """Decode `STEPS` tokens for each of `batch` sequences."""
    rows: Any = worker.model.kernels
    layers: Any = worker.codec.layers  # type: ignore[attr-defined]
    kernels = TimedKernels(rows._native)
    clock = Clock(DecodeEngine.step, kernels)
    with ExitStack() as patched:
        patched.enter_context(patch.object(DecodeEngine, "step", lambda engine, parts: clock.step(engine, parts)))
        for owner in (rows, *dict.fromkeys(layer.kernels for layer in layers)):
            patched.enter_context(patch.object(owner, "_native", kernels))
        asyncio.run(_run(worker, batch, replace(sampling, max_tokens=STEPS), kernels if recorded else None))
    return clock.times


async def _run(worker: Worker, batch: int, sampling: Sampling, records: TimedKernels | None) -> None:
    pages = batch * worker.layout.pages(PROMPT + STEPS)
    runner = ModelRunner(worker.model, worker.codec, pages, batch, recorded=batch if records else 0)
    if records is not None and runner._recorder is not None:
        runner._recorder = TimedRecorder(runner._recorder, records)
        runner.record()
    pool = PagePool(pages, batch)
    scheduler: DecodeScheduler[Stream] = DecodeScheduler(
        pool, runner.memory.footprint, SchedulerLimits(0, batch, worker.layout.page_tokens)
    )
    streams = [_landed(worker, runner, scheduler, sampling, nth) for nth in range(batch)]
    steps = Steps(runner, scheduler, KeptRows(0))
    readers = [asyncio.create_task(_read(stream)) for stream in streams]
    for stream in streams:
        request = stream.job.request
        sampler = SamplerState(request.sampling, request.prompt_ids, (), kernels=worker.model.kernels)
        steps.join(stream, Sequence([5], sampler, perf_counter()))
    await asyncio.gather(*readers)
    await steps.close()


def _landed(
    worker: Worker, runner: ModelRunner, scheduler: DecodeScheduler[Stream], sampling: Sampling, nth: int
) -> Stream:
    """A sequence whose prompt is in the cache."""
    generator = torch.Generator().manual_seed(nth)
    ids = torch.randint(10, worker.model.spec.vocab, (PROMPT,), generator=generator).tolist()
    stream = Stream(DecodeJob(Request(str(nth), tuple(ids), sampling), str(nth), 0))
    stream.seat = scheduler.admit(stream, PROMPT, PROMPT + STEPS)
    assert stream.seat.grant is not None
    runner.forward([Span(stream.seat.grant.slot, 0, PROMPT, stream.seat.grant.pages)], ids, wanted=[0])
    return stream


async def _read(stream: Stream) -> None:
    async for _ in stream.events():
        pass


def section(worker: Worker, found: list[dict[str, Any]], command: str = "python -m bench.step --out docs") -> str:
    """The page's section."""
    spec, threads = worker.model.spec, torch.get_num_threads()
    machine = this_machine(worker.kernels, threads)
    sizes = f"{spec.num_layers} layers, hidden {spec.hidden}, {PROMPT} tokens each"
    shape = f"{worker.name}, codec {worker.codec.name}: {sizes}, {threads} compute threads, {worker.kernels}"
    lines = [
        f"## Overhead of a decode step, {worker.name}",
        "",
        f"`{command}` · {shape}; {machine.cpu}, {load_note()}",
        "",
        "| tokens chosen | batch | step, ms | between steps, ms | Python within, ms | operators | kernels "
        "| Python and scheduling | target |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['sampling']} | {row['batch']} | {row['step_ms']:.2f} | {row['between_ms']:.2f} "
        f"| {row['python_ms']:.2f} | {row['operators']} | {row['kernels']} | {row['share']:.0%} "
        f"| ≤ {TARGET:.0%} |"
        for row in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    as_a_role()
    main()
