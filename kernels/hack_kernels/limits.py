"""Bounds that kernels keep to, and by which memory is planned."""

from __future__ import annotations

from typing import Final

HELD_TOKENS: Final = 2**15
"""The most tokens whose pages a prompt's attention on a GPU holds dequantized at once. Larger batches are attended to
in parts. A single sequence may have more tokens."""
