"""A profile of this machine runs the simulator."""

from __future__ import annotations

from pathlib import Path

from bench.durations import TOKENS, measure
from hackkv.model.products import ROWS
from sim.cluster import Cluster
from sim.costs import read_profile
from sim.jobs import Arrival
from tests.pair import PI, tiny_worker
from tests.sim.clusters import small


def test_a_profile_is_measured_and_simulated(tmp_path: Path) -> None:
    profile = measure(tiny_worker(), (8, PI), (1, 3), (PI, 3 * PI), repeats=1)
    assert all(seconds > 0 for grid in (profile.prefill, profile.decode) for row in grid.seconds for seconds in row)
    assert 0 < profile.attend_share <= 1
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json())
    assert read_profile(path) == profile
    spec = small(prefills=1, decodes=1)
    measured = {"profile": path, "chunk_tokens": 64}
    spec = spec.model_copy(
        update={
            "prefill": (spec.prefill[0].model_copy(update=measured),),
            "decode": (spec.decode[0].model_copy(update={**measured, "max_batch": 3}),),
        }
    )
    rows = Cluster(spec).run([Arrival(0.0, 64, 5), Arrival(0.0, 40, 9)]).rows
    assert rows.ok.all()
    assert (rows["e2el_s"] > 0).all()


def test_passes_are_timed_on_both_sides_of_where_the_library_takes_over() -> None:
    """A pass of packed weights takes half the time with 256 rows as with 255."""
    assert {side for rows in ROWS for side in (rows - 1, rows) if side > TOKENS[0]} <= set(TOKENS)
