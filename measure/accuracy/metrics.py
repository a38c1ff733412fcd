"""From an answer to a number. Text metrics are those of the field: rapidfuzz and Google's rouge-score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
from rapidfuzz import fuzz
from rouge_score import rouge_scorer

from measure.accuracy.stats import Floats
from measure.tasks import Ids

Decode = Callable[[Ids], str]
TAIL = 64
"""Tokens at the end of a perplexity window that decode mode scores too."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A model's answer. Under teacher forcing: its first choice at each place of the truth; else what it wrote."""

    ids: Ids
    truth: Ids
    nll: Floats
    """Of the truth, token by token; empty when the model wrote freely."""


class Measure(StrEnum):
    """How an answer is scored; `PERPLEXITY` and `TAIL` score in nats per token, all others in 0..1."""

    PERPLEXITY = "perplexity"
    TAIL = "perplexity of the last 64"
    TOKENS = "tokens right"
    WHOLE = "answers right"
    FOUND = "answer found"
    EDIT = "edit similarity"
    ROUGE1 = "ROUGE-1"

    @property
    def is_perplexity(self) -> bool:
        """Whether lower is better."""
        return self in (Measure.PERPLEXITY, Measure.TAIL)


def score(measure: Measure, answered: Answered, decode: Decode) -> float:
    """One sample's score."""
    match measure:
        case Measure.PERPLEXITY:
            return float(answered.nll.mean())
        case Measure.TAIL:
            return float(answered.nll[-TAIL:].mean())
        case Measure.TOKENS:
            return float((answered.ids == answered.truth).mean())
        case Measure.WHOLE:
            return float(np.array_equal(answered.ids, answered.truth))
    said, truth = decode(answered.ids), decode(answered.truth)
    if measure is Measure.FOUND:
        return float(truth.strip() in said)
    if measure is Measure.EDIT:
        return float(fuzz.ratio(said, truth)) / 100
    return float(_rouge().score(truth, said)["rouge1"].fmeasure)


@cache
def _rouge() -> rouge_scorer.RougeScorer:
    return rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)


def first_divergence(said: Ids, exact: Ids) -> int | None:
    """The first place at which two greedy runs differ, counted from 0; None if they agree to the end."""
    shared = min(len(said), len(exact))
    differs = np.flatnonzero(said[:shared] != exact[:shared])
    if len(differs):
        return int(differs[0])
    return None if len(said) == len(exact) else shared
