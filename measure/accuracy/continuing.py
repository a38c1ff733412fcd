"""Continuing: how well the model predicts what follows a prompt, from what the prompt left in its cache.

The prompt goes through prefill, and the codec evicts its rows. Then held-out text follows under teacher forcing, as in
a replay. If decode reads a codec's pages as prefill does, the text comes in chunks; else it comes token by token. So
evictions count, and codecs without evictions are scored on the same tokens. A text, and code most of all, seldom needs
what stood long ago. Tasks that ask for that (`questions`) show what perplexity does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hackkv.model.worker import Worker
from measure.accuracy import engine, reading
from measure.accuracy.cells import Found
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of, left
from measure.tasks import Ids, join

POINTS: Final = (512, 1024, 2048)
"""Tokens of the prompt."""
AFTER: Final = 2 * reading.BLOCK
WINDOWS: Final = 3


def prepare(subject: Subject, limits: RunLimits) -> Prepared:
    """Beginnings of the longest documents, `limits.samples` of them (`WINDOWS` unless set)."""
    limit = limits.context(subject)
    points = [point for point in POINTS if point + AFTER <= limit]
    if not points:
        raise ValueError(f"needs {POINTS[0] + AFTER} tokens of context, the limit is {limit}")
    windows = _windows(subject, limits.samples or WINDOWS, points[-1] + AFTER)
    exact = reading.Exact(subject, [window[:-1] for window in windows])

    def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
        for point in left(points, done):
            blocks = list[np.ndarray]()
            for index, window in enumerate(windows):
                states = exact(index)[point : point + AFTER]
                hidden = states if worker.codec.lossless else _after(worker, window[: point + AFTER], point)
                blocks.append(reading.blocks_of(worker, hidden, states, torch.from_numpy(window[point + 1 :])))
                advance(point + AFTER)
            yield point, reading.found_in(blocks)

    tokens = len(windows) * sum(point + AFTER for point in points)
    return Prepared(tokens, f"{len(windows)} windows", digest_of(windows), tuple(points), measure)


def _windows(subject: Subject, count: int, length: int) -> list[Ids]:
    """Windows of `length` + 1 tokens; the last token is only a truth. Raises `ValueError` if the text is too short."""
    documents = sorted(subject.documents, key=lambda document: -len(document.text))[:count]
    found = [join(subject.prefix, subject.encode(document.text))[: length + 1] for document in documents]
    if len(found) < count or min(map(len, found)) <= length:
        raise ValueError(f"the held-out text has no {count} documents of {length + 1} tokens")
    return found


@torch.inference_mode()
def _after(worker: Worker, window: Ids, point: int) -> Tensor:
    """Hidden states [T - point, hidden] of the tokens behind the prompt, which ends at `point`."""
    lanes = engine.ParallelSequences(worker, [len(window)])
    lanes.prefill([window[:point]], [1])
    step = engine.CHUNK_TOKENS if worker.codec.decodes_as_prefill else 1
    return torch.cat([lanes.advance([chunk])[0] for chunk in _cut(window[point:], step)])


def _cut(ids: Ids, step: int) -> Sequence[Ids]:
    return [ids[start : start + step] for start in range(0, len(ids), step)]
