"""Medians of device time: CUDA graphs of calls between events; the second-level cache is emptied before each call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

FLUSH_BYTES: Final = 256 * 2**20
"""Larger than any GPU's second-level cache."""
CALLS: Final = 10
"""Calls in a graph. The start of the graph is spread over all of them."""
WARM_UP_S: Final = 0.5
"""The clocks of an idle GPU rise within this time."""

Runs = Callable[[], object]


def measure(run: Runs, device: torch.device, *, rounds: int = 15, cold: bool = True) -> float:
    """Median microseconds of one call. `cold` empties the cache before each call, which inputs larger than the cache
    would not need."""
    on_gpu = device.type == "cuda"
    calls = CALLS if on_gpu else 1
    if not cold:
        return _median_us(repeated(run, calls, device), device, rounds if on_gpu else 1) / calls
    flush = Flush(device)

    def flushed() -> None:
        flush()
        run()

    both, alone = (repeated(each, calls, device) for each in (flushed, flush))
    times = [_us(both, device) - _us(alone, device) for _ in range(rounds if on_gpu else 1)]
    return statistics.median(times) / calls


class Flush:
    """Empties the second-level cache by reading. Written data would be written back to memory during the next call."""

    def __init__(self, device: torch.device) -> None:
        size = FLUSH_BYTES if device.type == "cuda" else 4096
        self._memory = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self._found = torch.empty((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        torch.amax(self._memory, dim=0, out=self._found)


def repeated(run: Runs, calls: int, device: torch.device) -> Runs:
    """A function that runs `run` `calls` times: as a CUDA graph on a GPU. `run` has compiled its kernels by then."""
    run()
    if device.type != "cuda":
        return lambda: [run() for _ in range(calls)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph.replay


def _median_us(run: Runs, device: torch.device, rounds: int) -> float:
    return statistics.median(_us(run, device) for _ in range(rounds))


def _us(run: Runs, device: torch.device) -> float:
    if device.type != "cuda":
        began = perf_counter()
        run()
        return (perf_counter() - began) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until its clocks have risen."""
    if device.type != "cuda":
        return
    x, until = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device), perf_counter() + WARM_UP_S
    while perf_counter() < until:
        x @ x
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """GB/s of a copy; read and written bytes both count."""
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device) / 1e3
