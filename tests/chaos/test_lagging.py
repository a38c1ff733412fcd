"""Bad days on devices whose copies lag: nodes die, frames rot and clients leave while pages are on their way.

A missing wait shows: lanes run no work before a caller waits for it, and free slots of the ring contain rubbish
(`tests/lanes.py`). A wrong byte gives a wrong token, and `chaos` compares tokens with an undisturbed run.
"""

from __future__ import annotations

import pytest

from chaos.scenario import play
from chaos.setup import Ask, Scenario, Setup
from chaos.storm import Storm, weather
from faults.plan import Action, FaultPlan, FaultRule, Point
from tests.lanes import SLOTS, Lagging, on_lanes
from tests.wires import LINKS_HERE

DAYS = [
    FaultRule(at=Point.LANDED, do=Action.KILL, seconds=0.1),
    FaultRule(at=Point.TOKEN, do=Action.KILL, nth=3, seconds=0.1),
    FaultRule(at=Point.FRAME, do=Action.CORRUPT, nth=2),
    FaultRule(at=Point.FRAME, do=Action.CUT, nth=2),
    FaultRule(at=Point.RESERVED, do=Action.FILL, seconds=0.2),
]
"""Scenarios in which copies stop half way or are repeated."""
CROWD = tuple(Ask(name=f"r{i}", prompt=70 + 31 * i, tokens=12) for i in range(4))
"""Requests that need more pages than a node has, so that sequences are swapped too."""


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("wire", ["inproc", *LINKS_HERE])
@pytest.mark.parametrize("rule", DAYS, ids=lambda rule: f"{rule.do}-{rule.at}")
def test_a_bad_day_on_lanes_that_lag_ends_as_on_the_processor(wire: str, rule: FaultRule) -> None:
    setup = Setup(wire=wire, decode_pages=16, codec="rot-k3v2")
    device = Lagging(5, computes=False)
    with on_lanes(device.lanes):
        report = play(Scenario(cluster=setup, requests=CROWD, faults=FaultPlan(rules=(rule,))))
    assert report.wrong == ()
    assert device.waits > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_a_storm_on_lanes_that_lag_passes_and_every_slot_comes_back(seed: int) -> None:
    device = Lagging(seed, computes=False)
    with on_lanes(device.lanes) as made:
        damage = weather(Storm(requests=150, minutes=0.3, joins=6, leaves=3, seed=seed))
    assert damage.wrong == []
    assert damage.endings.total() == 150
    assert len(damage.strikes) > 10
    assert device.waits > 0
    for each in made:
        assert each.ring is not None
        assert each.ring.free == SLOTS
