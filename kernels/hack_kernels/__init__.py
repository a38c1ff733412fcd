"""Attention kernels on compressed pages: one boundary (`base.py`), several backends, loaded by name.

`load("auto")` takes the fastest CPU backend that this machine can run, because hackkv's engine computes on the CPU.
Kernels for a GPU are loaded by name. Asking for a backend that the machine cannot run is an error, never a fallback.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, cast

import torch

from hack_kernels.base import Backend, BackendUnavailable

BACKENDS: Final = {
    "reference": "hack_kernels.reference",
    "cpu": "hack_kernels.cpu",
    "triton": "hack_kernels.triton.backend",
}
"""Name -> module with `create(device) -> Backend`. Importing it or calling `create` raises `BackendUnavailable` where
the backend cannot run. Without a device the backend takes its own."""

AUTO: Final = ("cpu", "reference")
"""What `auto` tries, fastest first."""


def load(name: str = "auto", device: torch.device | None = None) -> Backend:
    """Load one backend, for `device` or for the backend's default device.

    Raises `BackendUnavailable` naming what is missing.
    """
    if name == "auto":
        return _first_available(device)
    if name not in BACKENDS:
        raise BackendUnavailable(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    return _create(name, device)


def _first_available(device: torch.device | None) -> Backend:
    missing: list[str] = []
    for name in AUTO:
        try:
            return _create(name, device)
        except BackendUnavailable as error:
            missing.append(f"{name}: {error}")
    raise BackendUnavailable("; ".join(missing))


def _create(name: str, device: torch.device | None) -> Backend:
    create = cast(Callable[[torch.device | None], Backend], importlib.import_module(BACKENDS[name]).create)
    return create(device)
