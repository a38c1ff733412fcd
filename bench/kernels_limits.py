"""The machine's limits, with which the kernels' speed is compared."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from hack_kernels.cpu import CpuBackend

from lab.rivals import read_all, run_dots

DOT_ROUNDS = 1_000_000  # some milliseconds


def read_bandwidth(threads: int) -> float:
    """GB/s at which half a GiB is read, best of several."""
    words = torch.zeros(1 << 26, dtype=torch.int64).view(torch.uint64)
    best = float("inf")
    for _ in range(7):
        began = perf_counter()
        read_all(words, threads)
        best = min(best, perf_counter() - began)
    return words.numel() * 8 / best / 1e9


def integer_dots(isa: str, threads: int) -> float:
    """10^9 products of two bytes per second, best of several."""
    run_dots(isa, 1000, threads)
    best = 0.0
    for _ in range(15):
        began = perf_counter()
        products = run_dots(isa, DOT_ROUNDS, threads)
        best = max(best, products / (perf_counter() - began) / 1e9)
    return best


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The highest rates of this machine."""

    read_gb_per_s: float
    integer_dots: float
    """10^9 products per second on all threads of the kernels."""
    one_core_dots: float
    """10^9 products per second on one thread."""


def measure_limits(backend: CpuBackend) -> MachineLimits:
    """Measure memory and vector units, each by the simplest loop that uses it."""
    dots = (integer_dots(backend.isa, threads) for threads in (backend.threads, 1))
    return MachineLimits(read_bandwidth(backend.threads), *dots)
