"""The paper's numbers as it prints them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from hackkv.config import Frozen, load

METHODS: Final = ("baseline", "CacheGen", "KVQuant", "HACK")
HELD_OUT: Final = ("T4", "L4", "Phi-3-14B")
FITTED: Final = ("arXiv", "Cocktail", "V100", "A100", "Mistral-7B", "Yi-34B")


class Case(Frozen):
    """One group of bars."""

    data: str
    model: str
    prefill: str
    reductions: tuple[float, float, float]
    """Of JCT by HACK against baseline, CacheGen, KVQuant, in percent."""
    figure: int


class Fig10(Frozen):
    """Where the time goes, in percent."""

    prefill_cut: dict[str, tuple[float, float]]
    decode_cut: dict[str, tuple[float, float]]
    transfer_cut: tuple[float, float]
    transfer_left: tuple[float, float]
    quantization: tuple[float, float]
    approximation: tuple[float, float]


class Fig14(Frozen):
    """JCT from 1 to 8 prefill replicas, percent more."""

    baseline: float
    others: tuple[float, float]


class Numbers(Frozen):
    """Everything in `numbers.yaml`; comments there say where it stands."""

    cases: dict[str, Case]
    fleet: dict[str, int]
    parallel: dict[str, dict[str, tuple[int, int]]]
    decode: str
    transfer_share: dict[str, float]
    fig10: Fig10
    fig13: dict[str, tuple[float, float]]
    fig14: Fig14
    table5: dict[str, dict[str, float]]
    table6: dict[str, dict[str, tuple[float, ...]]]
    table7: dict[str, float]
    table8: dict[int, dict[str, float]]


@cache
def numbers() -> Numbers:
    """Read once."""
    return load(Numbers, Path(__file__).with_name("numbers.yaml"))
