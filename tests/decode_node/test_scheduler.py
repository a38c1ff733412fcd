"""Continuous batching: first come, first served, never above the batch limit, and who leaves is gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.scheduler import DecodeScheduler

STEPS = st.lists(st.tuples(st.sampled_from(["join", "leave", "schedule"]), st.integers(0, 30)), max_size=60)


@given(STEPS, st.integers(1, 5))
def test_batches_are_the_oldest_that_are_there(steps: list[tuple[str, int]], max_batch: int) -> None:
    """Against a plain list of who is there, in order of joining."""
    scheduler: DecodeScheduler[int] = DecodeScheduler(max_batch)
    there: list[int] = []
    running: list[int] = []
    joined = 0
    for action, which in steps:
        if action == "join":
            scheduler.join(joined)
            there.append(joined)
            joined += 1
        elif action == "leave":
            scheduler.leave(which)
            there, running = ([other for other in group if other != which] for group in (there, running))
        else:
            batch = scheduler.schedule()
            running = there[:max_batch]
            assert batch == running
        assert (scheduler.running, scheduler.waiting) == (len(running), len(there) - len(running))


def test_a_batch_is_a_copy() -> None:
    """A sequence may leave while the step that holds the batch runs."""
    scheduler: DecodeScheduler[str] = DecodeScheduler(2)
    scheduler.join("a")
    batch = scheduler.schedule()
    scheduler.leave("a")
    assert batch == ["a"]
    assert scheduler.schedule() == []


def test_an_impossible_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        DecodeScheduler(0)
