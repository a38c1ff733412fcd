"""Bounds that kernels keep and that memory is counted by."""

from __future__ import annotations

from typing import Final

HELD_TOKENS: Final = 2**15
"""Tokens whose pages a prompt's attention on a GPU holds dequantized at once, or those of one sequence if it has more:
larger batches are attended to in parts."""
