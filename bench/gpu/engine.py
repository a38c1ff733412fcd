"""The engine's rows: whole steps and passes of large models with random weights, and the speed at which KV is copied.

Weights are drawn and KV is random bytes, so nothing is downloaded, and contexts of any length exist at once. A step
ends when its tokens have reached the host. Contenders are codecs, and `sdpa`: the same model over a contiguous cache in
the model's type, with torch's fused attention.

These rows need what hackkv itself needs (`WHEELS` of `bench.gpu`).
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Final

import torch
from hack_kernels.base import Planes
from hack_kernels.triton.backend import TritonBackend

from bench.gpu.models import LLAMA, QWEN, TINY, Shape, exact_prompt, exact_step, random_model
from bench.gpu.processes import Task
from bench.gpu.shapes import Row, randomize
from bench.passes import GREEDY, Passes, median_s
from bench.wire import ends, push_s
from decode_node.engine import DecodeEngine, Sequence, StepPart
from hackkv.batch import Span
from hackkv.codec import KvCodec
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.errors import ConfigError
from hackkv.kv_memory import KvMemory
from hackkv.model.config import ModelSpec
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from transport.wires import WIRES

CODECS: Final = (DEFAULT_CODEC, "hack", "fp16")
PAGE: Final = 64
CHUNK: Final = 2048
"""Rows of a prompt in one pass."""
REPEATS: Final = 5
"""Number of runs, of which the median counts; one run if kernels are interpreted."""
FRAME: Final = 2 << 20
"""Bytes of a frame on the wire."""


STEPS: Final = (
    *((LLAMA, 2**14, batch) for batch in (32, 8, 1)),
    *((LLAMA, 2**12, 32), (QWEN, 2**14, 32), (LLAMA, 2**16, 1), (LLAMA, 2**16, 8), (LLAMA, 2**16, 32)),
    *((LLAMA, 2**12, 8), (LLAMA, 2**12, 1), (QWEN, 2**14, 8), (QWEN, 2**14, 1), (QWEN, 2**16, 32), (QWEN, 2**12, 32)),
)
"""(model, tokens, batch); those with a target come first."""
PROMPTS: Final = (2**14, 2**12, 2**13, 2**15)
TARGETS: Final = {(LLAMA, 2**14, 32): "<= 1.35x its memory floor"}


def rows(*, smoke: bool) -> Iterator[Task]:
    """Every row of the engine, the most important first."""
    steps = [(TINY, 2 * PAGE, 2)] if smoke else list(STEPS)
    prompts, shape = ([2 * PAGE], TINY) if smoke else (list(PROMPTS), LLAMA)
    kept, most = prompts[0], 3
    for each in steps[:most]:
        yield _step(*each)
    for tokens in prompts:
        yield Task(f"prompt {shape.name} {tokens}", partial(prompt_row, shape, tokens))
    for what in COPIES:
        yield Task(f"{what} {shape.name} {kept}", partial(copy_row, what, shape, kept))
    for name in wires():
        yield Task(f"link {name}", partial(link_row, name, 1 if smoke else 256))
    for each in steps[most:]:
        yield _step(*each)


def _step(shape: Shape, tokens: int, batch: int) -> Task:
    return Task(f"step {shape.name} {tokens} x {batch}", partial(step_row, shape, tokens, batch))


def step_row(shape: Shape, tokens: int, batch: int, backend: TritonBackend) -> Row:
    """A decode step as one process runs it, timed in several ways: with each operator enqueued (and the attention part
    of that), recorded as a CUDA graph, with every sequence filling a page, and as steps of a node that looks ahead."""
    model = random_model(shape, tokens + 2 * PAGE, backend.device, backend.rows)
    us, notes, floors, repeats = dict[str, float](), list[str](), dict[str, float](), repeats_on(backend)
    for name in CODECS:
        with fitting(notes, name):
            runner, pages = random_kv(model, name, tokens + PAGE, batch, backend, recorded=batch)
            passes = Passes(runner, pages)
            step, codec = passes.a_step(batch, tokens + 1), runner.codec
            us[f"{name}, eager"] = median_s(step, repeats) * 1e6
            before = codec.attend_s
            step()
            torch_ends(backend.device)
            us[f"{name}, attention"] = (codec.attend_s - before) * 1e6
            with recording(notes, name):
                runner.record()
            us[name] = median_s(step, repeats) * 1e6
            us[f"{name}, pages fill"] = median_s(passes.a_step(batch, tokens), repeats) * 1e6
            us[f"{name}, ahead"] = steady_s(runner, pages, batch, tokens, repeats) * 1e6
            notes.append(f"{name}: {batch / us[name] * 1e6:.0f} tokens/s, {waits(step, backend.device)} waits a step")
            floors[name] = model.weights.nbytes + runner.memory.footprint.resting_bytes(tokens) * batch
            del runner, passes, step
    with fitting(notes, "sdpa"):
        us["sdpa"] = median_s(exact_step(model, tokens, batch), repeats) * 1e6
    target = TARGETS.get((shape, tokens, batch), "")
    return _row("step", f"{shape.name}, {tokens} tokens x {batch}", us, notes, (floors, batch, target))


def steady_s(runner: ModelRunner, pages: int, batch: int, tokens: int, steps: int) -> float:
    """Seconds of one step of a node's engine: mean over `steps` steps after one that warms up."""
    engine, sampling = DecodeEngine(runner), replace(GREEDY, max_tokens=1 << 30)
    states = [SamplerState(sampling, (3,), (), kernels=runner.model.kernels) for _ in range(batch)]
    going = [Sequence([5], state, 0.0) for state in states]
    tables = [tuple(range(slot * pages, (slot + 1) * pages)) for slot in range(batch)]
    began = 0.0
    for number in range(steps + 1):
        engine.step(
            [
                StepPart(sequence, Span(slot, tokens + number, 1, tables[slot]), replay=False)
                for slot, sequence in enumerate(going)
            ]
        )
        began = began or perf_counter()
    return (perf_counter() - began) / steps


@contextmanager
def recording(notes: list[str], name: str) -> Iterator[None]:
    """Adds a note if the device cannot record steps; then they are enqueued."""
    try:
        yield
    except ConfigError as error:
        notes.append(f"{name}: {error}")


def prompt_row(shape: Shape, tokens: int, backend: TritonBackend) -> Row:
    """Time a prompt in passes of `CHUNK` rows, alone and with its pages leaving as they leave a prefill node."""
    model = random_model(shape, tokens + PAGE, backend.device, backend.rows)
    us, notes = dict[str, float](), list[str]()
    for name in CODECS:
        with fitting(notes, name):
            runner, pages = random_kv(model, name, tokens, 1, backend)
            passes = Passes(runner, pages)
            for run, more in ((passes.a_pass, ""), (passes.a_shipped_pass, ", shipped")):
                chunks = [run(at, min(CHUNK, tokens - at)) for at in range(0, tokens, CHUNK)]
                us[name + more] = median_s(partial(_each, chunks), 1) * 1e6
            del runner, passes, chunks, run
    with fitting(notes, "sdpa"):
        us["sdpa"] = median_s(exact_prompt(model, tokens), 1) * 1e6
    return _row("prompt", f"{shape.name}, {tokens} tokens", us, notes, ({}, tokens, ">= 0.95x with exact prefill"))


def _each(runs: Series[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _row(what: str, shape: str, us: dict[str, float], notes: list[str], more: tuple[dict[str, float], int, str]) -> Row:
    """A row. `more` is (codec -> bytes that a step must read, tokens of a run, target)."""
    floors, tokens, target = more
    first = next((name for name in CODECS if name in us), None)
    if first is None:
        raise RuntimeError(f"no codec fits memory: {'; '.join(notes)}")
    ratio = us["sdpa"] / us[first] if "sdpa" in us else None
    rate = floors[first] / us[first] / 1e3 if first in floors else None
    return Row(what, shape, us, ratio, rate, target, tokens / us[first] * 1e6, notes)


COPIES: Final = ("export", "install", "swap out", "swap in")


def copy_row(what: str, shape: Shape, tokens: int, backend: TritonBackend) -> Row:
    """Copy the KV of one sequence: to the wire's order or back, or to the resting order in host memory or back."""
    codec, pages = codec_on(backend, shape.spec(tokens), DEFAULT_CODEC), list(range(tokens // PAGE))
    memory = KvMemory(codec, shape.spec(tokens).kv_layout(PAGE), len(pages), 1)
    for pool in memory.pools:
        randomize(pool.planes)
    layers, heads = range(shape.layers), range(shape.kv_heads)
    swapped = memory.copy_out(pages, 0, tokens)

    def export() -> list[tuple[int, int, Planes]]:
        return [(layer, part.first, part.own()) for layer in layers for part in memory.export(layer, pages)]

    exported = export()

    def install() -> None:
        with memory.lanes.arriving():
            for layer, first, planes in exported:
                count = next(iter(planes.values())).shape[1]
                memory.install(layer, heads, pages[first : first + count], planes)

    runs: dict[str, Callable[[], object]] = {
        "export": export,
        "install": install,
        "swap out": lambda: memory.copy_out(pages, 0, tokens),
        "swap in": lambda: memory.copy_back(swapped, pages, 0),
    }

    def run() -> None:
        runs[what]()
        torch_ends(backend.device)

    us = median_s(run, repeats_on(backend)) * 1e6
    moved = sum(plane.nbytes for _, _, planes in exported for plane in planes.values())
    return Row(what, f"{shape.name}, {tokens} tokens", {DEFAULT_CODEC: us}, gb_per_s=moved / us / 1e3)


def wires() -> list[str]:
    """Names of wires that this machine can use between two ends in one process. NCCL needs a GPU for each end."""
    found = list[str]()
    for name in sorted(set(WIRES) - {"nccl"}):
        try:
            WIRES[name].check()
        except ConfigError:
            continue
        found.append(name)
    return found


def link_row(name: str, frames: int, _: TritonBackend) -> Row:
    """The fastest of `REPEATS` handoffs over loopback; both ends share a process."""

    async def best_s() -> float:
        async with ends(name) as (sender, address):
            return min([await push_s(sender, address, frames, bytes(FRAME)) for _ in range(REPEATS)])

    us = asyncio.run(best_s()) * 1e6
    return Row("link", f"{name}, {frames * FRAME >> 20} MiB", {name: us}, gb_per_s=frames * FRAME / us / 1e3)


@contextmanager
def fitting(notes: list[str], name: str) -> Iterator[None]:
    """Leaves a contender out, with a note, if its KV does not fit the device."""
    try:
        yield
    except torch.OutOfMemoryError:
        notes.append(f"{name}: does not fit memory")
        torch.cuda.empty_cache()


def codec_on(backend: TritonBackend, spec: ModelSpec, name: str) -> KvCodec:
    """A codec with pages of `PAGE` tokens."""
    return make_codec(CodecConfig(name=name, settings={"page_tokens": PAGE}), spec.kv_shape, backend)


def random_kv(
    model: Llama, name: str, tokens: int, batch: int, backend: TritonBackend, recorded: int = 0
) -> tuple[ModelRunner, int]:
    """(runner, pages of each sequence): `batch` sequences have room for `tokens` rows each, full of random bytes."""
    pages = -(-tokens // PAGE) + 1
    runner = ModelRunner(model, codec_on(backend, model.spec, name), pages * batch, batch, recorded=recorded)
    for pool in runner.memory.pools:
        randomize(pool.planes)
    return runner, pages


def waits(run: Callable[[], None], device: torch.device) -> int:
    """How often the host waits for the device in one run; 0 without a device."""
    if device.type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len(found)


def repeats_on(backend: TritonBackend) -> int:
    """Number of runs; see `REPEATS`."""
    return REPEATS if backend.device.type == "cuda" else 1


def torch_ends(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
