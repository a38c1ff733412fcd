"""Calls everything that serving calls, before a node's port opens.

A backend may compile a kernel when it is called for the first time, which takes seconds. No request waits for that.
Steps are recorded later, over the pools that the node serves from (`hackkv.model.graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final

import torch
from hack_kernels.compiler import Compiler, OnKernel

from hackkv.batch import Span
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, sample
from hackkv.model.worker import Worker
from hackkv.types import Sampling

SLOTS: Final = 2
"""Sequences that hold anything. A larger batch repeats them, and repeats write the same bytes."""
TOKEN: Final = 0
LONG: Final = 258
"""A prompt that runs alone has at least this many rows, less one: a backend may compile other kernels for many."""
SHORT: Final = 3
"""Rows of a prompt in a large batch: a chunk of two rows and a chunk of one."""
PROGRESS_S: Final = 5.0
"""Seconds between two words about kernels that are compiled."""
_GREEDY: Final = Sampling(0, 1 << 30, temperature=0.0, ignore_eos=True)


def warm_up(worker: Worker, compiler: Compiler, most: int, say: Callable[[str], None]) -> None:
    """Compile what a node with batches of up to `most` sequences calls, and call it once. `say` gets the progress, from
    other threads."""
    sizes = compiler.batches(most)
    with compiler.compiling(now_and_then(say)):
        call_all(worker, sizes)
    call_all(worker, sizes)


def now_and_then(say: Callable[[str], None]) -> OnKernel:
    """A function that tells `say` every `PROGRESS_S` how many kernels are compiled."""
    due = monotonic() + PROGRESS_S

    def tell(done: int, total: int) -> None:
        nonlocal due
        if (now := monotonic()) >= due:
            due = now + PROGRESS_S
            say(f"compiling kernels, {done} of {total} are done")

    return tell


@torch.inference_mode()
def call_all(worker: Worker, sizes: Sequence[int]) -> None:
    """Compute prompts and steps in batches of each of `sizes`, and move pages and rows out of pools and back.

    It takes small pools of its own and leaves none.
    """
    page_tokens, footprint = worker.codec.page_tokens, worker.footprint
    # One row short of a full page, and long enough that some page is read in its sealed form.
    rows = max(footprint.window.pages + 2, -(-LONG // page_tokens)) * page_tokens - 1
    num_pages = rows // page_tokens + 2
    runner = ModelRunner(worker.model, worker.codec, SLOTS * num_pages, SLOTS)
    tables = [tuple(range(slot * num_pages, (slot + 1) * num_pages)) for slot in range(SLOTS)]
    for size in sizes:
        count = rows if size <= SLOTS else SHORT
        _serve(runner, [Span(i % SLOTS, 0, count, tables[i % SLOTS], prompt=count) for i in range(size)])
    for slot, table in enumerate(tables):
        _move(runner, slot, table[: rows // page_tokens], rows)
    if worker.model.device.type == "cuda":
        torch.cuda.synchronize(worker.model.device)
        torch.cuda.empty_cache()


def _serve(runner: ModelRunner, whole: Sequence[Span]) -> None:
    """Compute prompts, then steps, then rows of a replay. Few sequences step until one fills a page, and once more."""
    model, page_tokens = runner.model, runner.layout.page_tokens
    states = [SamplerState(_GREEDY, [TOKEN], (), kernels=model.kernels) for _ in whole]
    chunks = [replace(span, count=span.count - 1) for span in whole]
    for wanted in (None, [1] * len(chunks)):
        runner.forward(chunks, [TOKEN] * sum(span.count for span in chunks), wanted=wanted)
    ends = [replace(span, held=span.count - 1, count=1) for span in whole]
    hidden = runner.forward(ends, [TOKEN] * len(whole), wanted=[1] * len(whole))
    sample(model.logits(hidden), states, model.kernels)
    held = max(runner.end_prompt(span) for span in whole[:SLOTS])  # all are alike

    def spans(count: int) -> list[Span]:
        return [Span(each.slot, held, count, each.pages, whole[0].count - begin) for each in whole]

    begin, fills = held, False
    while len(whole) <= SLOTS and not fills:
        fills = (held + 1) % page_tokens == 0
        runner.choose(spans(1), [TOKEN] * len(whole), states)
        held += 1
    runner.choose(spans(1), [TOKEN] * len(whole), states)
    held += 1
    runner.forward(spans(SHORT), [TOKEN] * SHORT * len(whole))


def _move(runner: ModelRunner, slot: int, pages: tuple[int, ...], rows: int) -> None:
    """Take the KV of a sequence out for the wire and for host memory, and bring it back."""
    memory, heads = runner.memory, range(runner.layout.num_kv_heads)
    with memory.lanes.arriving():
        for layer in range(runner.layout.num_layers):
            for leaving in memory.export(layer, pages):
                with leaving as planes:
                    stop = leaving.first + next(iter(planes.values())).shape[1]
                    memory.install(layer, heads, pages[leaving.first : stop], planes)
            memory.seal_rows(layer, pages, slot, rows, 0)
    memory.copy_back(memory.copy_out(pages, slot, rows), pages, slot)
