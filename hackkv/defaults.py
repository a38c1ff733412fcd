"""Defaults, which the command line shows before anything else of the project is loaded."""

from __future__ import annotations

from typing import Final

DEFAULT_CODEC: Final = "rot-k3v2"
EXACT_CODEC: Final = "fp16"
"""Loses nothing; what others cost is told beside it."""
DEFAULT_MAX_KL: Final = 0.15
"""In nats, mean over positions."""
