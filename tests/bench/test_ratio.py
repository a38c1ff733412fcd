"""`python -m bench.ratio` compares the planner's split of machines with all splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ratio
from bench.ratio import MOST_LOST, QUESTIONS, Found, answer, lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "documents"])
def test_the_planned_split_is_within_5_percent_of_the_best(name: str) -> None:
    found = answer(QUESTIONS[name], replicas=5, seed=0)
    assert set(found.grid) == {(1, 4), (2, 3), (3, 2), (4, 1)}
    assert found.lost <= MOST_LOST
    assert found.rate == pytest.approx(found.grid[found.planned], rel=0.05)


def test_a_bad_split_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Found({(1, 2): 4.0, (2, 1): 8.0}, (1, 2), 4.0)
    assert found.lost == 0.5
    assert "50.0% **off**" in "\n".join(lines({"chat": found}, "command"))
    monkeypatch.setattr(ratio, "answer", lambda *_: found)
    assert ratio.main(["--out", str(tmp_path)]) == 1
    assert "**off**" in (tmp_path / "plan.md").read_text()
