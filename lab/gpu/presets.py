"""Page formats of the codecs `rot-*`."""

from __future__ import annotations

from typing import Final

from hack_kernels.window import Window

PRESETS: Final = ((4, 4, Window()), (3, 3, Window(1, 2)), (3, 2, Window(1, 2)), (2, 2, Window(1, 2)))
"""(bits of K, bits of V, window of pages that queries see exactly)"""
