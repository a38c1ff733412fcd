"""Medians of device time: CUDA graphs between events, the second-level cache emptied before each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

FLUSH_BYTES = 256 * 2**20
"""More than any GPU's second-level cache."""


def measure(run: Callable[[], object], device: torch.device, *, rounds: int = 25, cold: bool = True) -> float:
    """Median microseconds of one call. `cold` empties the cache before each, which larger inputs would not need."""
    run()
    if device.type != "cuda":
        began = perf_counter()
        run()
        return (perf_counter() - began) * 1e6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(rounds):
        if cold:
            flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return float(statistics.median(times))


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """GB/s of a copy, read and written bytes counted."""
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device) / 1e3
