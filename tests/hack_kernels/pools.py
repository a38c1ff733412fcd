"""Kernels and pools for tests of the page format `hack`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hack_kernels.base import Backend, Pool
from hack_kernels.hack_format import HackFormat, HackKernels
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from torch import Tensor

CPU = torch.device("cpu")


def hack_kernels(backend: Backend, fmt: HackFormat) -> HackKernels:
    """A backend's kernels for `fmt`."""
    definition: Callable[[HackFormat, torch.device], HackKernels] = HackReference
    return backend.kernels_for(fmt, definition)


def reference(fmt: HackFormat) -> HackReference:
    """The definition."""
    return HackReference(fmt, CPU)


def empty_pool(kernels: HackKernels, fmt: HackFormat, num_pages: int, heads: int, num_slots: int = 1) -> Pool:
    """A zeroed pool on the processor."""
    return new_pool(fmt, kernels, CPU, num_pages, num_slots, range(heads))


def random_rows(seed: int, *shape: int) -> Tensor:
    """Gaussian float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
