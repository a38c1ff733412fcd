"""Homomorphic attention kernels: one protocol, several backends, loaded by name.

`load("auto")` takes the fastest backend of the processor that this machine can run, as hackkv's engine computes there;
kernels for a GPU are loaded by name. Asking for one that the machine cannot run is an error, never a silent fallback.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, cast

from hack_kernels.base import BackendUnavailable, HackKernels

BACKENDS: Final = {
    "reference": "hack_kernels.reference",
    "cpu": "hack_kernels.cpu",
    "triton": "hack_kernels.triton.backend",
}
"""Name -> module with `create() -> HackKernels`; module or function raise `BackendUnavailable` where it cannot run."""

AUTO: Final = ("cpu", "reference")
"""What `auto` tries, fastest first."""


def load(name: str = "auto") -> HackKernels:
    """Load one backend. Raises `BackendUnavailable` naming what is missing."""
    if name == "auto":
        return _first_available()
    if name not in BACKENDS:
        raise BackendUnavailable(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    return _create(name)


def _first_available() -> HackKernels:
    missing: list[str] = []
    for name in AUTO:
        try:
            return _create(name)
        except BackendUnavailable as error:
            missing.append(f"{name}: {error}")
    raise BackendUnavailable("; ".join(missing))


def _create(name: str) -> HackKernels:
    create = cast(Callable[[], HackKernels], importlib.import_module(BACKENDS[name]).create)
    return create()
