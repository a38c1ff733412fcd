"""Reading: how well the model predicts held-out text, and how far its predictions move from those with exact KV.

The windows are the beginnings of the longest documents. One of them is long, and all go through prefill from an empty
cache. Attention looks back only, so the first 512 tokens of a window score as a window of 512 tokens would: one pass
scores every length. Scores are means over blocks of tokens, and the bootstrap draws blocks: neighbouring tokens are
alike, blocks less so.

Codecs that evict rows of whole prompts are not scored here: reading would score only the codec of their pages.
`continuing` scores them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model.worker import Worker
from measure.accuracy import engine
from measure.accuracy.cells import Found
from measure.accuracy.metrics import Measure
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of
from measure.accuracy.variants import EXACT
from measure.tasks import Ids, join

POINTS: Final = (512, 2048, 4096, 8192)
"""Number of tokens read."""
SHORT: Final = 2048
SHORT_WINDOWS: Final = 3
"""Number of windows of `SHORT` tokens for each long one."""
LONGER_WINDOWS: Final = 3
"""Number of windows of the longest point in addition to the first one."""
BLOCK: Final = 128
GARBAGE: Final = 20.0
"""Nats that a codec is charged for a block if its KV is not finite: more than a uniform guess costs."""


def prepare(subject: Subject, limits: RunLimits) -> Prepared:
    """`limits.samples` long windows (1 unless set), and three short ones for each."""
    points, left_out = _points(subject, limits)
    return _reading(subject, _windows(subject, max(1, limits.samples), points[-1]), points, left_out)


def prepare_longer(subject: Subject, limits: RunLimits) -> Prepared:
    """`limits.samples` windows (3 unless set) of the largest point. They come from the longest documents after the
    first, which `prepare` reads at the same length by default."""
    points, _ = _points(subject, limits)
    count = limits.samples or LONGER_WINDOWS
    windows = _windows(subject, 1 + count, points[-1])[1 : 1 + count]
    return _reading(subject, [window for window in windows if len(window) == points[-1]], points[-1:], [])


def _points(subject: Subject, limits: RunLimits) -> tuple[list[int], list[str]]:
    """The points within the limit, and a line about each of the others. Raises `ValueError` if no point is left."""
    limit = limits.context(subject)
    points = [point for point in POINTS if point <= limit]
    if not points:
        raise ValueError(f"needs {POINTS[0]} tokens of context, the limit is {limit}")
    return points, [f"at {point}: the limit is {limit}" for point in POINTS if point > limit]


def _reading(subject: Subject, windows: Sequence[Ids], points: Sequence[int], left_out: list[str]) -> Prepared:
    """The material from `windows`, at those of `points` for which a window is long enough."""
    if not windows:
        raise ValueError("the held-out text has no document of enough tokens")
    read = tuple(point for point in points if max(map(len, windows)) >= point)
    exact = Exact(subject, windows)

    def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
        if worker.codec.eviction is not None:
            return
        blocks = [_blocks(worker, window, exact(index), advance) for index, window in enumerate(windows)]
        yield from ((point, _upto(point, blocks)) for point in read)

    counts = ", ".join(f"{sum(len(window) >= point for window in windows)} windows of {point}" for point in points)
    return Prepared(sum(map(len, windows)), counts, digest_of(windows), read, measure, left_out)


def _windows(subject: Subject, long_ones: int, longest: int) -> list[Ids]:
    """Beginnings of the longest documents: long windows, then short ones. Each is cut to the length of a point."""
    documents = sorted(subject.documents, key=lambda document: -len(document.text))
    found = list[Ids]()
    for document in documents[: long_ones * (1 + SHORT_WINDOWS)]:
        length = longest if len(found) < long_ones else min(SHORT, longest)
        ids = join(subject.prefix, subject.encode(document.text))[:length]
        whole = max((point for point in POINTS if point <= len(ids)), default=0)
        if whole:
            found.append(ids[:whole])
    return found


class Exact:
    """Hidden states of the windows with exact KV, computed once for all rows."""

    def __init__(self, subject: Subject, windows: Sequence[Ids]) -> None:
        self._subject, self._windows = subject, windows
        self._states = dict[int, Tensor]()
        self._lock = threading.Lock()

    def __call__(self, index: int) -> Tensor:
        with self._lock:
            if index not in self._states:
                worker = self._subject.with_codec(EXACT.codec)
                self._states[index] = _states(worker, self._windows[index], lambda count: None)
            return self._states[index]


@torch.inference_mode()
def _states(worker: Worker, window: Ids, advance: Advance) -> Tensor:
    """Hidden states [T, hidden] after each token, chunk by chunk."""
    lanes, parts = engine.ParallelSequences(worker, [len(window)]), list[Tensor]()
    for start in range(0, len(window), engine.CHUNK_TOKENS):
        chunk = window[start : start + engine.CHUNK_TOKENS]
        parts += lanes.advance([chunk])
        advance(len(chunk))
    return torch.cat(parts)


@torch.inference_mode()
def _blocks(worker: Worker, window: Ids, exact: Tensor, advance: Advance) -> np.ndarray:
    """[blocks, 3]: nats per token, KL from exact KV, and share of first choices kept; means over each block.

    The last token has no successor: its block's perplexity is the mean of one token less.
    """
    try:
        hidden = exact if worker.codec.lossless else _states(worker, window, advance)
    except NonFiniteError:
        return np.tile([GARBAGE, GARBAGE, 0.0], (len(window) // BLOCK, 1))
    return blocks_of(worker, hidden, exact, torch.from_numpy(window[1:]))


def blocks_of(worker: Worker, hidden: Tensor, exact: Tensor, truth: Tensor) -> np.ndarray:
    """`_blocks` from hidden states [T, hidden] and those with exact KV; `truth` are the tokens that follow."""
    out = list[list[float]]()
    for start in range(0, len(hidden), BLOCK):
        rows = slice(start, start + BLOCK)
        found = F.log_softmax(worker.model.logits(hidden[rows]).float(), -1)
        wanted = found if hidden is exact else F.log_softmax(worker.model.logits(exact[rows]).float(), -1)
        said = truth[rows]
        nll = -found[: len(said)].gather(1, said[:, None]).mean()
        kl = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        kept = (found.argmax(-1) == wanted.argmax(-1)).float().mean()
        out.append([round(float(x), 6) for x in (nll, kl, kept)])
    return np.array(out)


def _upto(point: int, windows: Sequence[np.ndarray]) -> Found:
    """The blocks of the first `point` tokens of every window that is long enough."""
    return found_in([blocks[: point // BLOCK] for blocks in windows if len(blocks) * BLOCK >= point])


def found_in(windows: Sequence[np.ndarray]) -> Found:
    """The scores of all blocks of `windows`."""
    blocks = np.concatenate(windows)
    columns = zip((Measure.PERPLEXITY, Measure.KL, Measure.TOP1), blocks.T.tolist(), strict=True)
    return Found(dict(columns))
