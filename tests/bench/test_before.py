"""`bench.before`: rows of two commits, and trees that cannot be run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.before import BENCHES, HERE, Bench, compared, main, run
from bench.sections import read_section


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_what_a_bench_wrote_is_read(bench: Bench) -> None:
    times = bench.times(read_section(HERE / "docs", bench.section))
    assert times
    assert all(ms > 0 for ms in times.values())


def test_the_median_of_a_rounds_ratios_counts() -> None:
    rounds = [
        ({"a": 10.0, "gone": 1.0}, {"a": 11.0}),
        ({"a": 20.0}, {"a": 20.0, "new": 1.0}),
        ({"a": 10.0}, {"a": 12.0}),
    ]
    (row,) = compared(rounds)
    assert (row.row, row.before_ms, row.now_ms, row.ratio) == ("a", 10.0, 12.0, 1.1)
    assert str(row) == "| a | 10.000 | 12.000 | 1.100 | 1.000 to 1.200 |"


def test_a_bench_that_fails_says_why(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(SystemExit, match=rf"step of {tmp_path} failed:\n.*No module named"):
        run(tmp_path, replace(BENCHES[0], command=("no_such_bench",)))


def test_a_tree_that_is_not_set_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.before", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert f"{tmp_path} has no .venv/bin/python" in capsys.readouterr().err
