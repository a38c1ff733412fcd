"""What `bench.operations` times."""

from __future__ import annotations

import pytest

from bench.operations import Clock, measure, table
from tests.pair import PI, tiny_worker


def test_all_time_of_a_prompt_is_some_operations_or_between_them() -> None:
    worker = tiny_worker("rot-k3v2")
    found = measure(worker, 5 * PI)
    for whole_s, clock in found:
        assert 0 < sum(clock.seconds.values()) < whole_s
        assert clock.calls["attend"] == worker.layout.num_layers
    lines = table(found)
    assert {line.split(" | ")[0] for line in lines} >= {
        "| attend",
        "| seal",
        "| rotate_rows",
        "| between operations",
        "| all",
    }


def test_an_operation_within_another_belongs_to_it_also_if_it_fails() -> None:
    clock = Clock()

    def fails() -> None:
        raise ValueError("fails")

    inner = clock.timed("inner", fails)
    with pytest.raises(ValueError, match="fails"):
        clock.timed("outer", inner)()
    assert clock.calls == {"outer": 1}
    with pytest.raises(ValueError, match="fails"):
        inner()
    assert clock.calls == {"outer": 1, "inner": 1}
