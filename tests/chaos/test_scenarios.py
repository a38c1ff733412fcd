"""The shipped scenarios pass, the same seed gives the same story, and the harness detects a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.scenario import play
from chaos.setup import Ask, Scenario, Setup
from chaos.storm import Storm, weather
from faults.plan import Action, FaultPlan, FaultRule, Point
from hackkv.config import load
from hackkv.errors import ConfigError

FILES = sorted((Path(__file__).parents[2] / "chaos" / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_ends_as_it_must(file: Path) -> None:
    assert play(load(Scenario, file)).wrong == ()


def test_there_are_scenarios() -> None:
    assert len(FILES) > 8


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    def story() -> list[tuple[float, str]]:
        lines: list[tuple[float, str]] = []
        rule = FaultRule(at=Point.TOKEN, do=Action.CUT, chance=0.05, times=0)
        asks = tuple(Ask(name=f"r{i}", at=i / 10, prompt=40 * i + 5, tokens=8) for i in range(6))
        play(Scenario(requests=asks, faults=FaultPlan(seed=seed, rules=(rule,))), lambda *line: lines.append(line))
        return lines

    assert story() == story()


def test_a_fault_that_cannot_be_survived_is_seen() -> None:
    """This proves that the harness can fail: every attempt of this request is cut."""
    rule = FaultRule(at=Point.TOKEN, do=Action.CUT, times=0)
    report = play(Scenario(cluster=Setup(), requests=(Ask(name="r"),), faults=FaultPlan(rules=(rule,))))
    assert report.wrong == ("r: node_lost, expected complete",)


@pytest.mark.slow
def test_a_small_storm_passes() -> None:
    damage = weather(Storm(requests=150, minutes=0.3, joins=6, leaves=3, seed=3))
    assert damage.wrong == []
    assert damage.endings.total() == 150
    assert len(damage.strikes) > 10


def test_a_scenario_with_a_stranger_in_its_expectations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "day.yaml"
    path.write_text("requests: [{name: a}]\nexpect: {b: complete}\n")
    with pytest.raises(ConfigError, match="which no request is called"):
        load(Scenario, path)
