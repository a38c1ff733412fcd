"""Sentences computed from the numbers. A sentence whose rows were not measured is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from measure.accuracy import stats
from measure.accuracy.metrics import Measure
from measure.accuracy.results import Results, Score
from measure.accuracy.stats import ConfidenceInterval

PERPLEXITY: Final = ("perplexity", Measure.PERPLEXITY)
COPY: Final = ("copy", Measure.TOKENS)
RECALL: Final = ("recall", Measure.TOKENS)
NEEDLE: Final = ("needle", Measure.TOKENS)
RESTATE: Final = ("restate", Measure.ROUGE1)
CODE: Final = ("code", Measure.EDIT)
Kind = tuple[str, Measure]


def pooled(results: Results, variant: str, kind: Kind) -> list[Score]:
    """A variant's cells of one task and measure, one per point."""
    return [s for s in results.scores if s.variant == variant and (s.task, s.measure) == kind]


def paired(results: Results, variant: str, other: str, kind: Kind) -> ConfidenceInterval | None:
    """How far `variant` is from `other` over all points of a task, paired: a difference, or a ratio minus 1."""
    ours, theirs = (
        np.array([value for cell in pooled(results, name, kind) for value in cell.samples]) for name in (variant, other)
    )
    if not len(ours) or len(ours) != len(theirs):
        return None
    return stats.ratio(ours, theirs) if kind[1].is_perplexity else stats.change(ours, theirs)


def mean(results: Results, variant: str, kind: Kind) -> float | None:
    """Mean over the points of a task."""
    cells = pooled(results, variant, kind)
    return float(np.mean([cell.score.value for cell in cells])) if cells else None


def findings(results: Results) -> list[str]:
    """All sentences whose rows were measured."""
    made = [sentence(results) for sentence in _SENTENCES]
    return [text for texts in made for text in texts]


def _against_exact(results: Results) -> list[str]:
    out = []
    for name in ("hack", "hack-k4v2", "hack-paper"):
        parts = _parts(results, name, "fp16")
        if parts:
            out.append(f"`{name}` against exact KV: {'; '.join(parts)}.")
    return out


def _pairs(results: Results) -> list[str]:
    out = []
    for name, other, what in _COMPARED:
        parts = _parts(results, name, other)
        if parts:
            out.append(f"{what} (`{name}` against `{other}`): {'; '.join(parts)}.")
    return out


def _parts(results: Results, name: str, other: str) -> list[str]:
    parts = []
    for kind, label in _LABELS:
        found = paired(results, name, other, kind)
        if found and found.value == found.low == found.high == 0:
            parts.append(f"{label} the same in every sample")
        elif found:
            unit = "%" if kind[1].is_perplexity else " points"
            low, high = f"{100 * found.low:+.1f}", f"{100 * found.high:+.1f}"
            parts.append(f"{label} {100 * found.value:+.1f}{unit} [{low}, {high}]")
    return parts


def _loss_removed(results: Results) -> list[str]:
    out = []
    for kind, label in ((PERPLEXITY, "perplexity"), (COPY, "copying")):
        ours, paper, exact = (mean(results, name, kind) for name in ("hack", "hack-paper", "fp16"))
        if None in (ours, paper, exact) or abs(paper - exact) < 1e-9:  # type: ignore[operator]
            continue
        share = 1 - (ours - exact) / (paper - exact)  # type: ignore[operator]
        loss = f"{label} ({exact:.3f} to {paper:.3f})"
        out.append(f"Of what `hack-paper` loses in {loss}, `hack` ({ours:.3f}) avoids {share:.0%}.")
    return out


def _sums_stored_or_not(results: Results) -> list[str]:
    pairs = [
        (a.samples, b.samples)
        for a in results.scores
        if a.variant == "hack-asymmetric" and (b := results.find("hack-asymmetric-no-se", a.task, a.point, a.measure))
    ]
    if not pairs:
        return []
    count = sum(len(a) for a, _ in pairs)
    differ = sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True))
    return [
        f"SE changes speed, not results: of {count} sample scores with stored and recomputed sums, {differ} differ."
    ]


def _modes(results: Results) -> list[str]:
    gaps: dict[str, float] = {}
    for cell in results.scores:
        if (cell.task, cell.measure) != ("decode", Measure.PERPLEXITY):
            continue
        other = results.find(cell.variant, "perplexity", cell.point, Measure.TAIL)
        if other and len(other.samples) == len(cell.samples):
            gap = cell.score.value / other.score.value - 1
            gaps[cell.variant] = max(gap, gaps.get(cell.variant, 0.0), key=abs)
    if not gaps:
        return []
    text = "Perplexity of the same 64 tokens by prefill and by decode steps: "
    same = {name: gap for name, gap in gaps.items() if not name.endswith("no-rqe")}
    if same:
        text += f"at most {100 * max(map(abs, same.values())):.1g} % apart where no page is requantized"
    others = [f"`{name}` {100 * gap:+.1f} %" for name, gap in gaps.items() if name not in same]
    if others:
        text += f"; decode against prefill where every token quantizes the open page again: {', '.join(others)}"
    return [text + "."]


_LABELS: Final = (
    (PERPLEXITY, "perplexity"),
    (COPY, "copying"),
    (RECALL, "recall"),
    (NEEDLE, "needle"),
    (RESTATE, "restating"),
    (CODE, "code"),
)
_COMPARED: Final = (
    ("hack-stochastic", "hack", "Stochastic instead of nearest rounding"),
    ("hack-k-codes", "hack", "K of the open page as codes"),
    ("hack-no-rqe", "hack", "RQE off"),
    ("hack-asymmetric", "hack", "Asymmetric instead of symmetric Q and P"),
    ("hack-32", "hack", "Π 32 instead of 64"),
    ("hack-128", "hack", "Π 128 instead of 64"),
    ("hack-paper", "hack-stochastic", "The paper instead of the open-page rule, both stochastic"),
    ("hack-paper-no-rqe", "hack-paper", "RQE off, the paper's way"),
)

_SENTENCES: Sequence[Callable[[Results], list[str]]] = (
    _against_exact,
    _loss_removed,
    _pairs,
    _sums_stored_or_not,
    _modes,
)
