"""A cluster waits for the check of a model as long as the check keeps reporting. The clock of these tests jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cluster import START_S, Checked, ClusterPlan, LocalCluster
from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import NodeLost
from tests.app.saying import Saying

LOSS = {"kl": 0.01}
LINES = [f"checking codec {number}" for number in range(10)]
WORDS: tuple[Mapping[str, object], ...] = (
    {"found": {"folder": "model", "name": "m", "devices": ["cpu"]}},
    *({"say": line} for line in LINES),
    {"passed": LOSS},
)


class Forks:
    """A fork server whose only child is the check. Loading takes `load_s`."""

    alive = True

    def __init__(self, check: Saying, load_s: float) -> None:
        self._check, self._load_s = check, load_s
        self.loading = 0

    async def fork(self, role: str, name: str) -> Saying:
        """Start the check."""
        assert role == "check"
        return self._check

    async def load(self, model: dict[str, Any], codec: dict[str, Any]) -> None:
        """Load the model that nodes share."""
        self.loading += 1
        try:
            await asyncio.sleep(self._load_s)
        finally:
            self.loading -= 1


async def outcome(folder: Path, pauses: Sequence[float], load_s: float = 1.0) -> tuple[Checked | NodeLost, float]:
    """The cluster's result of a check, and the seconds that it took. Asserts that nothing is left behind."""
    check, said = Saying(WORDS, pauses), list[str]()
    forks = Forks(check, load_s)
    cluster = LocalCluster(ClusterPlan({}, {}), folder, said.append)
    cluster._server = forks  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        found: Checked | NodeLost = await cluster._check(START_S)
        assert said == LINES
    except NodeLost as error:
        found = error
    assert check.ended
    assert not forks.loading
    return found, loop.time() - began


def test_a_check_that_goes_on_saying_something_may_take_any_time(tmp_path: Path) -> None:
    pauses = [START_S - 1] * len(WORDS)
    checked, took = on_a_virtual_clock(outcome(tmp_path, pauses))
    assert checked == Checked("model", "m", LOSS, ("cpu",))
    assert took == pytest.approx(sum(pauses))


@pytest.mark.parametrize("heard", range(len(WORDS)))
def test_a_check_that_falls_silent_is_given_up(tmp_path: Path, heard: int) -> None:
    """The cluster gives up `START_S` after the last word, however many words came before."""
    pauses = [START_S / 2] * heard + [START_S + 1] * (len(WORDS) - heard)
    error, took = on_a_virtual_clock(outcome(tmp_path, pauses))
    assert str(error) == "the model was not checked in time"
    assert took == pytest.approx(sum(pauses[:heard]) + START_S)


def test_a_model_that_is_not_loaded_in_time_is_given_up(tmp_path: Path) -> None:
    """The timeout of loading starts after the check's last word."""
    error, took = on_a_virtual_clock(outcome(tmp_path, [1.0] * len(WORDS), load_s=10 * START_S))
    assert str(error) == "the model was not checked in time"
    assert took == pytest.approx(len(WORDS) + START_S)
