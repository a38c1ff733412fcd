"""The numbers that the paper prints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from hackkv.config import Frozen, load

METHODS: Final = ("baseline", "CacheGen", "KVQuant", "HACK")
HELD_OUT: Final = ("T4", "L4", "Phi-3-14B")
FITTED: Final = ("arXiv", "Cocktail", "V100", "A100", "Mistral-7B", "Yi-34B")


class Case(Frozen):
    """One group of bars in figures 9, 11 and 12."""

    data: str
    model: str
    prefill: str
    reductions: tuple[float, float, float]
    """JCT that HACK saves against baseline, CacheGen and KVQuant, in percent."""
    figure: int


class Fig10(Frozen):
    """Figure 10: where the time goes, in percent."""

    prefill_cut: dict[str, tuple[float, float]]
    decode_cut: dict[str, tuple[float, float]]
    transfer_cut: tuple[float, float]
    transfer_left: tuple[float, float]
    quantization: tuple[float, float]
    approximation: tuple[float, float]


class Fig14(Frozen):
    """Figure 14: how much JCT grows from 1 to 8 prefill replicas, in percent."""

    baseline: float
    others: tuple[float, float]


class Numbers(Frozen):
    """The contents of `numbers.yaml`; comments there say where the paper prints each number."""

    cases: dict[str, Case]
    fleet: dict[str, int]
    parallel: dict[str, dict[str, tuple[int, int]]]
    decode: str
    transfer_share: dict[str, float]
    transfer_range: tuple[float, float]
    """Least and largest share of T4, A10G and L4."""
    fig10: Fig10
    fig13: dict[str, tuple[float, float]]
    fig14: Fig14
    table5: dict[str, dict[str, float]]
    table6: dict[str, dict[str, tuple[float, ...]]]
    table7: dict[str, float]
    table8: dict[int, dict[str, float]]


@cache
def numbers() -> Numbers:
    """The contents of `numbers.yaml`, read once."""
    return load(Numbers, Path(__file__).with_name("numbers.yaml"))
