"""The table of `bench.handoff`."""

from __future__ import annotations

from bench.handoff import KEPT, MOVED, line


def test_differences_are_those_of_requests_that_follow_each_other() -> None:
    """The machine slows down from round to round, so the medians of both kinds differ by something else."""
    kept = [{"seconds": 2.0**nth, "router": 0.1, "prefill-0": 2 * 2.0**nth, "decode-0": 0.0} for nth in range(3)]
    more = {"seconds": (0.3, 0.1, 0.2), "router": (0, 0, 0), "prefill-0": (0.2, 0.3, 0.1), "decode-0": (0.1, 0.2, 0.3)}
    moved = [{name: one[name] + more[name][nth] for name in one} for nth, one in enumerate(kept)]
    assert line("both", {KEPT: kept, MOVED: moved}) == "| both | 2.00 | 2.10 | +0.20 | +0.20 | +0.20 |"
