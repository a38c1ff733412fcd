"""Many observations at once count the same as one after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.watch.histogram import BulkHistogram
from router.watch.metrics import SECONDS

AMOUNTS = st.lists(st.sampled_from([*SECONDS, 0.0, 1e6]) | st.floats(0, 700).map(lambda amount: round(amount, 3)))


def shown(amounts: list[float], *, together: bool) -> dict[str, float]:
    registry = CollectorRegistry()
    series = BulkHistogram("gap_seconds", "Gaps.", ["model"], buckets=SECONDS, registry=registry).labels("tiny")
    if together:
        series.observe_all(amounts)
    else:
        for amount in amounts:
            series.observe(amount)
    lines = (line.rpartition(" ") for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    return {name: round(float(value), 6) for name, _, value in lines if "_created" not in name}


@given(AMOUNTS)
def test_many_at_once_count_as_one_after_another(amounts: list[float]) -> None:
    assert shown(amounts, together=True) == shown(amounts, together=False)
