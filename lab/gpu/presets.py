"""Pages of codecs `rot-*`."""

from __future__ import annotations

from typing import Final

from hack_kernels.window import Window

PRESETS: Final = ((4, 4, Window()), (3, 3, Window(1, 2)), (3, 2, Window(1, 2)), (2, 2, Window(1, 2)))
"""Bits of K and V, and what their queries see exactly."""
