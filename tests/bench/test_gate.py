"""The arithmetic of the live gate; `python -m bench.gate` runs it over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gate.__main__ import Load, capacity, record, simulate, table
from bench.gate.agreement import JCT, compare, spread
from bench.gate.around import Around, measure, spec_of
from bench.gate.live import Subject, napping, stages_of
from hackkv.types import Role
from measure.serve.shapes import fixed
from sim.costs import Grid, Profile

# Recorded: SmolLM2, rot-k4v4, the first requests of two repeats; seconds.
LIVE = (
    {JCT: [1.52, 1.94, 1.60, 2.05], "prefill": [0.13, 0.29, 0.14, 0.33], "decode": [1.35, 1.61, 1.42, 1.68]},
    {JCT: [1.50, 1.90, 1.61, 2.01], "prefill": [0.12, 0.28, 0.15, 0.32], "decode": [1.34, 1.58, 1.42, 1.65]},
    {JCT: [9.50, 9.90, 9.61, 9.01], "prefill": [5.12, 5.28, 5.15, 5.32], "decode": [4.34, 4.58, 4.42, 3.65]},
)
"""The last repeat met another program; of three the median counts."""


def simulated(prefill: float = 1.0, decode: float = 1.0) -> dict[str, list[float]]:
    parts = {
        "prefill": [prefill * seconds for seconds in LIVE[0]["prefill"]],
        "decode": [decode * seconds for seconds in LIVE[0]["decode"]],
    }
    return {JCT: [sum(pair) for pair in zip(*parts.values(), strict=True)], **parts}


@pytest.mark.parametrize(
    ("factors", "off"),
    [
        ({}, set()),
        ({"prefill": 1.1, "decode": 0.9}, set()),
        # 30% of 0.22 s is 4% of the JCT: more than the machine's mood.
        ({"prefill": 1.3}, {("mean", "prefill"), ("p90", "prefill")}),
        ({"decode": 1.2}, {("mean", "decode")}),
        ({"decode": 1.4}, {("mean", "decode"), ("mean", JCT), ("p90", "decode"), ("p90", JCT)}),
        ({"decode": 0.8}, {("mean", "decode"), ("mean", JCT)}),
    ],
)
def test_a_stage_that_is_off_is_named(factors: dict[str, float], off: set[tuple[str, str]]) -> None:
    compared = compare(LIVE, simulated(**factors))
    assert {(each.statistic, each.stage) for each in compared if not each.agrees} == off


def test_a_difference_of_milliseconds_says_nothing() -> None:
    live = [{JCT: [1.0, 1.0], "transfer": [0.004, 0.004]}]
    assert all(each.agrees for each in compare(live, {JCT: [1.0, 1.0], "transfer": [0.0, 0.0]}))
    assert not all(each.agrees for each in compare(live, {JCT: [1.0, 1.0], "transfer": [0.1, 0.1]}))


def test_the_page_names_load_stages_and_what_is_off() -> None:
    load = Load(0.25, 0.7, 4, LIVE, simulated(decode=1.2))
    lines = table([load])
    assert lines[2].startswith("| 25%: 4 at 0.70/s, repeats within 4")
    assert "| decode | 1515 | 1818 | +20% **off** | 1659 | 1991 | +20% |" in lines[4]
    assert lines[-1].startswith("5 of 6 statistics agree; mean of decode +20%")
    assert spread(LIVE[:2]) == pytest.approx(0.013, abs=0.001)
    assert len(record([load], "here")["loads"][0]["compared"]) == 6


def test_a_live_row_is_the_profiles_times_a_factor() -> None:
    grid = Grid(rows=(1, 4), columns=(0, 100), seconds=((1.0, 2.0), (3.0, 4.0)))
    around = Around(
        request_s=0, call_s=0, setup_s=0, passes=(0.5, 2.0), steps=(1.0, 3.0), prefill_beside=1, decode_beside=1
    )
    more = around.profile(Profile(prefill=grid, decode=grid))
    assert more.prefill.seconds == ((0.5, 1.0), (6.0, 8.0))
    assert more.decode.seconds == ((1.0, 2.0), (9.0, 12.0))


def test_capacity_is_that_of_the_slower_role() -> None:
    passes = Grid(rows=(64, 512), columns=(0, 100), seconds=((0.1, 0.1), (0.8, 0.8)))
    steps = Grid(rows=(1, 8), columns=(0, 1000), seconds=((0.01, 0.01), (0.02, 0.02)))
    profile = Profile(prefill=passes, decode=steps)
    assert capacity(profile, fixed(64, 10), 1.0, 1.0) == pytest.approx(10)
    assert capacity(profile, fixed(64, 10), 2.0, 1.0) == pytest.approx(5)
    assert capacity(profile, fixed(64, 100), 1.0, 1.0) == pytest.approx(8 / (0.02 * 100))


@pytest.mark.slow  # starts a cluster of processes
@pytest.mark.alone  # an event that the router reads late moves time from a stage to the one before (`StageClock`)
async def test_real_processes_take_no_less_than_the_simulator_says(tmp_path: Path) -> None:
    """Naps never end early. So single requests spend at least the simulated time in both roles; and all their stages
    are there."""
    steps = Grid(rows=(1, 4), columns=(64, 512), seconds=((0.004, 0.006), (0.005, 0.007)))
    passes = Grid(rows=(64, 512), columns=(0, 512), seconds=((0.02, 0.03), (0.1, 0.15)))
    alone = Profile(prefill=passes, decode=steps)
    file = tmp_path / "profile.json"
    file.write_text(alone.model_dump_json())
    subject, around = Subject("", "rot-k4v4"), Around.nothing(alone)
    spec = spec_of(subject, dict.fromkeys((Role.PREFILL, Role.DECODE), 200), file, around)
    async with napping(subject, spec, tmp_path) as cluster:
        calls = [cluster.call(0.0, 50 + 200 * number, 6) for number in range(4)]
        live = [stages_of(await cluster.send([call])) for call in calls]
        beside = await measure(cluster, alone)
    for call, stages in zip(calls, live, strict=True):
        simulated = simulate(spec, [call])
        assert stages[JCT][0] >= simulated[JCT][0]
        for stage in ("prefill", "decode"):
            assert stages[stage][0] >= simulated[stage][0] - 1e-3
    assert min(beside.passes) >= 1
    assert len(beside.passes) == len(beside.steps) == 2
