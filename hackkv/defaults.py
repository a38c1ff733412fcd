"""Defaults, which the command line shows before anything else of the project is loaded."""

from __future__ import annotations

from typing import Final

DEFAULT_CODEC: Final = "rot-k3v2"
EXACT_CODEC: Final = "fp16"
"""The lossless codec, to which all others are compared."""
DEFAULT_MAX_KL: Final = 0.15
"""In nats, mean over positions."""
