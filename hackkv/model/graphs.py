"""Recorded decode steps: one program in place of ten operators a layer and more. On a GPU it is a CUDA graph, on the
processor a list of calls of C++ without Python.

A recorded step is a fixed program on fixed memory. Only its input differs from step to step, and lies at one place
(`hackkv.step_input`). A GPU records steps of some numbers of rows before it serves, and a batch runs as the next larger
one. The processor records a number of rows when it first occurs.

The host knows which sequences fill a page. Such a sequence reads its page exactly until its next row. So the page is
sealed after the layers of the step, by a second program, which is recorded for some numbers of pages. A step that fills
no page does not run it. Rejected: a launch in each layer that looks for full pages. Every step would pay for it,
but with pages of 64 rows only 1 in 64 steps of one sequence fills a page, and four in ten steps of 32 sequences.

Choosing is not recorded, since its operators depend on the rules of requests. Prompts and replays are not recorded
either, nor is sealing on the processor: it is rare, and its time is in the kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from hack_kernels.base import DEFINITION, RowKernels
from hack_kernels.recorder import Recorder
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
"""From this number on, recorded numbers of rows are multiples of it."""


class CudaRecorder:
    """Implements `Recorder` by CUDA graphs, which share one pool of memory."""

    queues = True

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


def recorder_on(device: torch.device, kernels: RowKernels) -> Recorder | None:
    """The recorder of a device for steps of these kernels; None if recording gains nothing."""
    return CudaRecorder(device) if device.type == "cuda" else kernels.recorder()


def recordable(codec: KvCodec, dtype: torch.dtype, *, queues: bool = True) -> bool:
    """Whether a decode step of a model in `dtype` does the same for all batches of a size that fill no page.
    `queues` is that of the recorder.

    Definitions look at lengths on the host, and so do a GPU's kernels of FP16 rows for queries of 32 bits. Open pages
    that are sealed go to the host too. Codecs that read some of their pages are left out: they may choose them
    anywhere.
    """
    kernels = DEFINITION not in codec.served_by.split(", ")
    return kernels and codec.decodes_as_prefill and not codec.seals_open_page and (dtype.itemsize == HALF or not queues)


def step_sizes(most: int) -> list[int]:
    """Rows of recorded steps of up to `most` sequences."""
    return sorted({*(size for size in (1, 2, 4) if size < most), *range(STEP, most, STEP), most})


def fill_sizes(most: int) -> list[int]:
    """Pages that recorded programs seal: up to `most`, each at most twice as many as the one before."""
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power < most), most})


class Graphs:
    """The recorded steps of a node."""

    def __init__(self, model: Llama, codec: KvCodec, memory: KvMemory, spare: Spare, most: int) -> None:
        """Steps have up to `most` sequences, over the pools of `memory`. Padding writes to the page and slot `spare`,
        which nobody else has."""
        self._model, self._codec, self._memory = model, codec, memory
        spec, page_tokens = model.spec, codec.page_tokens
        pages = min(-(-spec.max_context // page_tokens), memory.pools[0].num_pages)
        self._input = StepInput(most, pages, page_tokens, spare, model.device)
        self._hidden = dict[int, Tensor]()
        """Rows of a step -> where it leaves its hidden states, [rows, hidden]."""
        self._faulty = torch.zeros(most, dtype=torch.bool, device=model.device)
        self._steps, self._seals = dict[int, Callable[[], None]](), dict[int, Callable[[], None]]()
        self._recorder: Recorder | None = None

    @property
    def queues(self) -> bool:
        """Whether a step that was given to the device may still run."""
        return self._recorder is not None and self._recorder.queues

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Take steps from now on. If the device works behind the host, all are recorded here, the largest first: it
        takes the memory that all share. Raises `ConfigError`."""
        self._recorder = recorder
        self._steps.clear()
        self._seals.clear()
        if not recorder.queues:
            return
        most = self._input.most
        self._input.put([], [], most, [], most, self._memory.lanes.compute)
        try:
            for size in reversed(step_sizes(most)):
                self._recorded_step(size)
            for count in reversed(fill_sizes(most)):
                self._recorded_seal(count)
        except RuntimeError as error:
            raise ConfigError(f"graphs: {self._model.device} cannot record a decode step: {error}") from error

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a step of these sequences runs here."""
        return self._recorder is not None and len(spans) <= self._input.most

    def run(self, spans: Sequence[Span], ids: Sequence[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A step: hidden states [B, hidden] after the final norm, and which sequences are at fault [B] bool (`Batch`).
        The next step overwrites both.

        With `after` [B] int64, the tokens are those in `after`, on the device, and `ids` is ignored. The pages that the
        step fills are then left open and need not be in the spans: `seal` follows before the next step.
        """
        count = len(spans)
        filled = [] if after is not None else self._input.filled(spans)
        size = _at_least(count, step_sizes(self._input.most)) if self.queues else count
        fills = self._fills(filled)
        self._input.put(spans, ids, size, filled, fills, self._memory.lanes.compute)
        if after is not None:
            self._input.ids[:count].copy_(after.clamp(min=0))  # a row without a token has no id
        self._faulty.zero_()
        self._recorded_step(size)()
        if fills:
            self._recorded_seal(fills)()
        return self._hidden[size][:count], self._faulty[:count]

    def seal(self, spans: Sequence[Span]) -> None:
        """Seal the pages that a step has left open. `spans` are those of the step, with these pages."""
        if filled := self._input.filled(spans):
            fills = self._fills(filled)
            self._input.put([], [], 0, filled, fills, self._memory.lanes.compute)
            self._recorded_seal(fills)()

    def _fills(self, filled: Sequence[Span]) -> int:
        return _at_least(len(filled), fill_sizes(self._input.most)) if filled and self.queues else len(filled)

    def _recorded_step(self, size: int) -> Callable[[], None]:
        if size not in self._steps:
            assert self._recorder is not None
            self._steps[size] = self._recorder.record(partial(self._step, size))
        return self._steps[size]

    def _recorded_seal(self, count: int) -> Callable[[], None]:
        if count not in self._seals:
            assert self._recorder is not None
            self._seals[count] = self._recorder.record(partial(self._seal, count))
        return self._seals[count]

    def _step(self, size: int) -> None:
        codec, pools = self._codec, self._memory.pools
        batch = self._input.batch(size, self._faulty[:size])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return codec.attend(layer, pools[layer], batch, q, k, v)

        self._hidden[size] = self._model.forward(self._input.ids[:size], self._input.positions[:size], attend)

    def _seal(self, count: int) -> None:
        fills = self._input.fills(count)
        for layer, pool in enumerate(self._memory.pools):
            self._codec.seal_held(layer, pool, fills)


def _at_least(count: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, count)]
