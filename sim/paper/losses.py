"""The paper's tables 6 and 7, what codes cost in accuracy, beside what `hackkv eval` measured of small models.

The paper's models have 7 to 180 billion parameters. Those on which our codecs are measured are much smaller, and only
two tasks of `hackkv eval` are scored as the paper scores a data set. So orders can be compared, amounts cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from measure.accuracy.findings import CODE, RESTATE, Kind, mean, paired
from measure.accuracy.metrics import Measure
from measure.accuracy.results import Results, read
from measure.accuracy.variants import EXACT
from sim.paper.numbers import Numbers
from sim.paper.tables import SHORT, table

SMALL: Final = "hackkv-small"
REAL: Final = "SmolLM2-135M-Instruct"
"""Models, by the names of their folders in docs/accuracy."""
TABLE6: Final = {
    "baseline": "fp16",
    "HACK 32": "hack-paper-32",
    "HACK 64": "hack-paper",
    "CacheGen": "cachegen",
    "KVQuant": "kvquant-2",
    "HACK 128": "hack-paper-128",
}
"""The paper's method -> our row of the same form."""
SAME_MEASURE: Final[dict[str, Kind]] = {"arXiv": RESTATE, "HumanEval": CODE}
"""Data set -> our task with the paper's measure: ROUGE-1 and edit similarity."""
_WORDS: Final = {"arXiv": "restating", "HumanEval": "code"}
TABLE7: Final = {"hack-paper-no-rqe": "hack-paper", "hack-no-rqe": "hack"}
"""Our row without requantization elimination -> the row with it."""
_TOKENS: Final = 2048


def accuracy(paper: Numbers, measured: Path) -> Iterator[str]:
    """Tables 6 and 7. `measured` is the folder with the files of `hackkv eval`. Raises `ConfigError` if the files of a
    model are missing."""
    small, real = read(measured / SMALL), read(measured / REAL)
    yield "## Tables 6 and 7: accuracy"
    yield ""
    yield (
        "Table 6: the baseline's score and the points that each method loses, mean (least to most) over the paper's "
        "models of 7 to 180 billion parameters."
    )
    yield ""
    yield from table(("method", *SHORT), _told(paper))
    yield (
        "Table 6, beside ours. A simulator cannot say what answers are worth, so ours come from the files of `hackkv "
        f"eval` ([accuracy](accuracy.md)). **Amounts cannot be compared**: `{SMALL}` and {REAL} are much smaller than "
        "the paper's models, and HACK's form of two bits ruins small models. Orders can. Two tasks have the paper's "
        f"measure: restating (ROUGE-1, as arXiv) and code (edit similarity, as HumanEval), both on `{SMALL}`. No task "
        'stands for IMDb or Cocktail. In points of the score, with 95% intervals; "-" was not measured.'
    )
    yield ""
    pairs = (cell for data in SAME_MEASURE for cell in (f"{data}: paper", f"{_WORDS[data]}: ours"))
    head = ("method", "our row", *pairs, f"{REAL}: perplexity at {_TOKENS:,}")
    yield from table(head, _beside(paper, small, real))
    yield _order(small)
    yield ""
    yield (
        "Table 7: points that HACK loses without requantization elimination. Ours are larger by construction: our rows "
        "without it show a query its own page as codes in prefill too, which the paper's Table 7 has on both sides of "
        "its comparison."
    )
    yield ""
    yield from table(("row", *SHORT), _requantized(paper, small))


def _told(paper: Numbers) -> Iterator[Sequence[str]]:
    for method, values in paper.table6.items():
        cells = (values[data] for data in SHORT)
        yield method, *(f"{np.mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in cells)


def _beside(paper: Numbers, small: Results, real: Results) -> Iterator[Sequence[str]]:
    for method, row in TABLE6.items():
        cells = []
        for data, kind in SAME_MEASURE.items():
            exact = mean(small, row, kind)
            ours = _lost(small, row, EXACT.name, kind) if row != EXACT.name else f"{100 * (exact or 0.0):.2f}"
            cells += [f"{np.mean(paper.table6[method][data]):.2f}", ours]
        found = real.find(row, "reading", _TOKENS, Measure.PERPLEXITY)
        if found is None:
            last = "-"
        elif row == EXACT.name:
            last = f"{found.score.value:.2f}"
        else:
            last = f"{100 * found.change.value:+,.1f}%"
        yield method, f"`{row}`", *cells, last


def _lost(results: Results, row: str, other: str, kind: Kind) -> str:
    """Points that `row` loses against `other`, with the interval; "-" if they were not measured on the same samples."""
    found = paired(results, row, other, kind)
    if found is None:
        return "-"
    return f"{-100 * found.value:.1f} [{-100 * found.high:.1f}, {-100 * found.low:.1f}]"


def _order(small: Results) -> str:
    """Whether smaller partitions lose less, as in the paper."""
    words = []
    for data, kind in SAME_MEASURE.items():
        scores = [mean(small, TABLE6[f"HACK {size}"], kind) or 0.0 for size in (32, 64, 128)]
        words.append(f"{_WORDS[data]} {'agrees' if scores == sorted(scores, reverse=True) else 'does not agree'}")
    return f"In the paper, smaller partitions lose less. By the means, {' and '.join(words)}."


def _requantized(paper: Numbers, small: Results) -> Iterator[Sequence[str]]:
    yield "paper: HACK/RQE", *(f"{-paper.table7[data]:.2f}" for data in SHORT)
    for row, other in TABLE7.items():
        kinds = (SAME_MEASURE.get(data) for data in SHORT)
        yield f"`{row}` against `{other}`", *("-" if kind is None else _lost(small, row, other, kind) for kind in kinds)
