"""Scores of answers. Text metrics are those of the field: rapidfuzz and Google's rouge-score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from rapidfuzz import fuzz

from measure.accuracy.stats import Floats
from measure.tasks import Ids

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Decode = Callable[[Ids], str]
TAIL = 64
"""Tokens at the end of a perplexity window that decode mode scores too."""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """A model's answer: under teacher forcing its first choice at each place of the truth, else the text it wrote."""

    ids: Ids
    truth: Ids
    nll: Floats
    """Negative log-likelihood of each token of the truth, in nats; empty when the model wrote freely."""


class Measure(StrEnum):
    """How an answer is scored. Scores are in 0..1, except perplexities and KL (nats per token) and lengths."""

    PERPLEXITY = "perplexity"
    TAIL = "perplexity of the last 64"
    KL = "KL"
    TOP1 = "top-1"
    TOKENS = "tokens right"
    WHOLE = "answers right"
    FOUND = "answer found"
    EDIT = "edit similarity"
    ROUGE1 = "ROUGE-1"
    NEEDLE = "needle"
    RECALL = "recall"
    COPY = "copying"
    UNFINISHED = "unfinished"
    PASS = "passes"
    LENGTH = "length ratio"
    """Tokens written. The report shows the ratio of their sum to exact KV's."""
    SAME = "same answer"
    SIMILAR = "similarity to exact"
    KEPT = "passes what exact passes"

    @property
    def is_perplexity(self) -> bool:
        """Whether scores are nats per token and the report shows their exponential."""
        return self in (Measure.PERPLEXITY, Measure.TAIL)


def score(measure: Measure, answered: ScoredAnswer, decode: Decode) -> float:
    """The score of one sample, by a measure that compares an answer with its truth."""
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
        return edit_similarity(said, truth)
    return float(_rouge().score(truth, said)["rouge1"].fmeasure)


def edit_similarity(said: str, truth: str) -> float:
    """Similarity in 0..1, by insertions and deletions of characters."""
    return float(fuzz.ratio(said, truth)) / 100


@cache
def _rouge() -> RougeScorer:
    from rouge_score import rouge_scorer  # noqa: PLC0415 - it loads scipy, for seconds

    return rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)


def first_divergence(said: Ids, exact: Ids) -> int | None:
    """The first place at which two greedy runs differ, counted from 0; None if they agree to the end."""
    shared = min(len(said), len(exact))
    differs = np.flatnonzero(said[:shared] != exact[:shared])
    if len(differs):
        return int(differs[0])
    return None if len(said) == len(exact) else shared
