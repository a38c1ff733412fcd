"""Clusters over a real link, in one process on the real clock: peers die and links break around a parcel."""

from __future__ import annotations

import pytest

from chaos.scenario import play
from chaos.setup import Ask, Scenario, Setup
from chaos.storm import Storm, weather
from faults.plan import AT_LINKS, Action, FaultPlan, FaultRule, Point
from tests.wires import LINKS_HERE

ON_EVERY_LINK = pytest.mark.parametrize("wire", LINKS_HERE)
FAULTS = [
    *(FaultRule(at=point, do=Action.KILL, seconds=0.1) for point in AT_LINKS),
    FaultRule(at=Point.CONNECT, do=Action.CUT),
    FaultRule(at=Point.SEND, do=Action.CUT, nth=2),
    FaultRule(at=Point.ARRIVED, do=Action.CUT, nth=2),
    FaultRule(at=Point.SEND, do=Action.CORRUPT),
]


@ON_EVERY_LINK
@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: f"{rule.do}-{rule.at}")
def test_a_request_survives_what_happens_to_a_parcel(wire: str, rule: FaultRule) -> None:
    """One node suffers the fault, once. Another node takes over, or the same one when it is back."""
    node = "decode-0" if rule.at in (Point.ARRIVING, Point.ARRIVED) else "prefill-0"
    lines = list[str]()
    scenario = Scenario(
        cluster=Setup(wire=wire),
        requests=tuple(Ask(name=name, prompt=70, tokens=5) for name in ("one", "other")),
        faults=FaultPlan(rules=(rule.model_copy(update={"node": node}),)),
    )
    report = play(scenario, lambda at_s, line: lines.append(line))
    assert report.wrong == ()
    assert f"{node}: {rule.do} at {rule.at}" in lines


@pytest.mark.slow
@ON_EVERY_LINK
def test_a_storm_over_a_link_passes(wire: str) -> None:
    damage = weather(Storm(requests=400, minutes=0.5, joins=6, leaves=3, wire=wire, seed=3))
    assert damage.wrong == []
    assert damage.endings.total() == 400
    assert sum(count for strike, count in damage.strikes.items() if " at link." in strike) > 5
