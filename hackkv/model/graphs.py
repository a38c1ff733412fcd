"""Decode steps that a device has recorded: one launch in place of some 30 operators a layer (CUDA graphs).

A recorded step is a fixed program on fixed memory. All that differs from step to step is its input, which lies at one
place (`hackkv.step_input`). So steps are recorded for some numbers of rows, and a batch runs as the next larger one.

Who fills a page is known to the host. The page's own sequence reads it exactly until its next row, so it is sealed
behind the layers of the step, by a program of its own, recorded for some numbers of pages, in steps that fill one.
Rejected: a launch in each layer that looks for full pages. In 32 layers that would cost every step some 60 us, at 2 us
a launch. Of the steps of one sequence 1 in 64 fills a page, of those of 32 sequences four in ten.

Choosing is not recorded: its operators depend on the rules of requests. Prompts and replays are not either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from hack_kernels.base import DEFINITION
from torch import Tensor

from hackkv.batch import Span
from hackkv.codec import KvCodec
from hackkv.errors import ConfigError
from hackkv.kv_memory import KvMemory
from hackkv.model.llama import Llama
from hackkv.step_input import Spare, StepInput

HALF: Final = 2
"""Bytes of 16 bits."""
STEP: Final = 8
"""From here on numbers of rows are multiples of it."""


class Recorder(Protocol):
    """How a device records."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does again what `work` enqueues, on the same memory. Runs `work` twice. What it takes for itself stays
        its own until something else that was recorded here runs. Raises `RuntimeError` if the device cannot."""
        ...


class CudaRecorder:
    """Implements `Recorder` by CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            work()  # what the first run compiles or takes for all later ones must not be recorded
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        replay: Callable[[], None] = graph.replay
        return replay


def recorder_on(device: torch.device) -> Recorder | None:
    """How a device records; None for the processor, which has nothing to gain."""
    return CudaRecorder(device) if device.type == "cuda" else None


def recordable(codec: KvCodec, dtype: torch.dtype) -> bool:
    """Whether a decode step of a model in `dtype` does the same for all batches of a size that fill no page.

    Definitions look at lengths on the host, and so do kernels of FP16 rows for queries of 32 bits. Open pages that are
    sealed go to the host too. Codecs that read some of their pages are left out: they may choose them anywhere.
    """
    kernels = DEFINITION not in codec.served_by.split(", ")
    return kernels and codec.decodes_as_prefill and not codec.seals_open_page and dtype.itemsize == HALF


def step_sizes(most: int) -> list[int]:
    """Rows of recorded steps of up to `most` sequences."""
    return sorted({*(size for size in (1, 2, 4) if size < most), *range(STEP, most, STEP), most})


def fill_sizes(most: int) -> list[int]:
    """Pages that recorded programs seal: up to `most`, each at most twice as many as the one before."""
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power < most), most})


class Graphs:
    """The recorded steps of a node."""

    def __init__(self, model: Llama, codec: KvCodec, memory: KvMemory, spare: Spare, most: int) -> None:
        """Of up to `most` sequences, over the pools of `memory`, whose page and slot `spare` nobody else has."""
        self._model, self._codec, self._memory = model, codec, memory
        spec, page_tokens = model.spec, codec.page_tokens
        pages = min(-(-spec.max_context // page_tokens), memory.pools[0].num_pages)
        self._input = StepInput(most, pages, page_tokens, spare, model.device)
        self._hidden = torch.zeros((most, spec.hidden), dtype=model.dtype, device=model.device)
        self._faulty = torch.zeros(most, dtype=torch.bool, device=model.device)
        self._steps, self._seals = dict[int, Callable[[], None]](), dict[int, Callable[[], None]]()

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Record all steps, the largest first: it takes the memory that all share. Raises `ConfigError`."""
        most = self._input.most
        self._input.put([], [], most, [], most, self._memory.lanes.compute)
        try:
            for size in reversed(step_sizes(most)):
                self._steps[size] = recorder.record(partial(self._step, size))
            for count in reversed(fill_sizes(most)):
                self._seals[count] = recorder.record(partial(self._seal, count))
        except RuntimeError as error:
            raise ConfigError(f"graphs: {self._model.device} cannot record a decode step: {error}") from error

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a step of so many sequences is recorded."""
        return bool(self._steps) and len(spans) <= self._input.most

    def run(self, spans: Sequence[Span], ids: Sequence[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A step: hidden states [B, hidden] after the final norm, and which sequences are at fault [B] bool (`Batch`).
        The next step overwrites both.

        With `after` [B] int64 the tokens are these, on the device, and `ids` does not count. Then the pages that the
        step fills are left open, and no span has to know them: `seal` follows before the next step.
        """
        count = len(spans)
        filled = [] if after is not None else self._input.filled(spans)
        size, fills = _at_least(count, step_sizes(self._input.most)), self._fills(filled)
        self._input.put(spans, ids, size, filled, fills, self._memory.lanes.compute)
        if after is not None:
            self._input.ids[:count].copy_(after.clamp(min=0))  # a row without a token has no id
        self._steps[size]()
        if fills:
            self._seals[fills]()
        return self._hidden[:count], self._faulty[:count]

    def seal(self, spans: Sequence[Span]) -> None:
        """Seal the pages that a step has left open. `spans` are those of the step, with these pages."""
        if filled := self._input.filled(spans):
            fills = self._fills(filled)
            self._input.put([], [], 0, filled, fills, self._memory.lanes.compute)
            self._seals[fills]()

    def _fills(self, filled: Sequence[Span]) -> int:
        return _at_least(len(filled), fill_sizes(self._input.most)) if filled else 0

    def _step(self, size: int) -> None:
        codec, pools = self._codec, self._memory.pools
        faulty = self._faulty[:size].zero_()
        batch = self._input.batch(size, faulty)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return codec.attend(layer, pools[layer], batch, q, k, v)

        hidden = self._model.forward(self._input.ids[:size], self._input.positions[:size], attend)
        self._hidden[:size].copy_(hidden)

    def _seal(self, count: int) -> None:
        fills = self._input.fills(count)
        for layer, pool in enumerate(self._memory.pools):
            self._codec.seal_held(layer, pool, fills)


def _at_least(count: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, count)]
