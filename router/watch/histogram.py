"""prometheus_client's histogram, with many observations at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial

from prometheus_client import Histogram


class BulkHistogram(Histogram):
    """Takes all observations of a sequence in one call: a hundred sequences may end together, each with hundreds of
    tokens."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Do what `observe` does with each amount. If the family has labels, this is for one of its series."""
        self._sum.inc(sum(amounts))
        for nth, count in Counter(map(partial(bisect_left, self._upper_bounds), amounts)).items():
            self._buckets[nth].inc(count)
