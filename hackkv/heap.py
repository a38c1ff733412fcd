"""Memory that was freed, and that the C library keeps because it lies between pieces in use."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give it back to the system. Only glibc keeps it that way; elsewhere nothing happens.

    Reading a tokenizer or a checkpoint frees many small pieces at once. A process that goes on for days asks for this
    when it has loaded what it needs.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
