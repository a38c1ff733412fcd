"""The compiled module, and the check that it was built from the sources beside it."""

from __future__ import annotations

import importlib
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from hack_kernels.base import BackendUnavailable

SOURCES: Final = Path(__file__).parents[2] / "csrc"


def supported_isas() -> list[str]:
    """Instruction sets that this build and processor run, fastest first. Raises `BackendUnavailable`."""
    return list(compiled().supported_isas())


@cache
def compiled() -> Any:
    """The compiled module. Raises `BackendUnavailable` where it is not built, `ImportError` where it is out of date."""
    try:
        module = importlib.import_module("hack_kernels._cpu")
    except ModuleNotFoundError as error:
        raise BackendUnavailable("the C++ extension hack_kernels._cpu is not built: pip install -e .") from error
    check_built_from(SOURCES, getattr(module, "SOURCES", ""))
    return module


def check_built_from(sources: Path, digest: str) -> None:
    """Compare the digest of the compiled sources (CMakeLists.txt) with a checkout's sources; a wheel has no sources.

    Python code could call an extension that is out of date with wrong arguments, or get other codes than its peers.
    """
    paths = sorted((path for pattern in ("*.h", "*.cpp", "simd/*.h") for path in sources.glob(pattern)), key=str)
    digests = "".join(sha256(path.read_bytes()).hexdigest() for path in paths)
    if paths and sha256(digests.encode()).hexdigest() != digest:
        raise ImportError(f"the C++ kernels were not built from {sources} as it is now: pip install -e . builds them")
