"""Attention kernels on compressed pages: one boundary (`base.py`), several backends, loaded by name.

`load("auto", device)` takes the fastest backend for that kind of device that this machine can run. Without a device it
takes one for the processor. Asking for a backend that the machine cannot run is an error, never a fallback.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Final, cast

import torch

from hack_kernels.base import Backend, BackendUnavailable
from hack_kernels.triton.support import gpus as gpus

BACKENDS: Final = {
    "reference": "hack_kernels.reference",
    "cpu": "hack_kernels.cpu",
    "triton": "hack_kernels.triton.backend",
}
"""Name -> module with `create(device) -> Backend`. Importing it or calling `create` raises `BackendUnavailable` where
the backend cannot run. Without a device the backend takes its own."""

DEFINITIONS: Final = "reference"
"""The backend that computes with the definition of every format, wherever torch runs."""
AUTO: Final = ("cpu", DEFINITIONS)
"""What `auto` tries on the processor, fastest first."""
AUTO_ON_GPU: Final = ("triton",)
"""What `auto` tries on a GPU that `gpus` calls usable. The definitions are too slow there to be taken by `auto`."""


def load(name: str = "auto", device: torch.device | None = None) -> Backend:
    """Load one backend, for `device` or for the backend's default device.

    Raises `BackendUnavailable` naming what is missing.
    """
    if name == "auto":
        return _first_available(AUTO_ON_GPU if device is not None and device.type == "cuda" else AUTO, device)
    if name not in BACKENDS:
        raise BackendUnavailable(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    return _create(name, device)


def _first_available(names: Sequence[str], device: torch.device | None) -> Backend:
    missing: list[str] = []
    for name in names:
        try:
            return _create(name, device)
        except BackendUnavailable as error:
            missing.append(f"{name}: {error}")
    raise BackendUnavailable("; ".join(missing))


def _create(name: str, device: torch.device | None) -> Backend:
    create = cast(Callable[[torch.device | None], Backend], importlib.import_module(BACKENDS[name]).create)
    return create(device)
