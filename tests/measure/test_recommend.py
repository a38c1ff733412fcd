"""`hackkv eval --recommend`: every preset in one table, smallest first, and one line of advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hackkv.canary import Meter, Row
from hackkv.codecs import CODECS
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.nodes import CodecLoss
from measure.accuracy.__main__ import main
from measure.accuracy.recommend import Recommendation


def row(name: str, share: float, kl: float | None) -> Row:
    return Row(name, share, None if kl is None else CodecLoss(kl, 0.9, 1.1, 2048))


def test_the_advice_is_the_smallest_below_each_bound() -> None:
    rows = (row("a", 0.1, float("nan")), row("b", 0.2, 0.1), row("c", 0.3, 0.01), row("exact", 1.0, None))
    advice = Recommendation("tiny", "a text", rows, {}).advice
    assert advice == "b is the smallest below KL 0.15; c is the smallest below KL 0.03"
    few = replace(rows[2], name="few", evicts=True)
    assert Recommendation("tiny", "a text", (few, *rows), {}).advice == advice, (
        "who asks for what is gone, nobody knows"
    )
    advice = Recommendation("tiny", "a text", rows[:1] + rows[3:], {}).advice
    assert advice == "exact is the smallest below KL 0.15; exact is the smallest below KL 0.03"


def test_every_preset_is_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "tiny", Tiny(max_context=192))
    arguments = ["--recommend", str(model), "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert f"{len(CODECS)} presets, some " in told.err
    table = {line.split()[1]: line.split() for line in told.out.splitlines() if line.startswith("│")}
    assert set(table) == set(CODECS)
    assert "tiny: 192 tokens of" in told.out
    assert "is the smallest below KL 0.15; " in told.out.splitlines()[-1]
    shares = [float(cells[3].rstrip("%")) for cells in table.values()]
    assert shares == sorted(shares)
    assert all(float(cells[-3]) > 0 and cells[-2] == "s" for cells in table.values()), "no preset lacks its time"
    page = (tmp_path / "out" / "tiny" / "recommended.md").read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(table)
    assert told.out.splitlines()[-1] in page
    monkeypatch.setattr(Meter, "measure", None)
    assert main(arguments) == 0
    assert capsys.readouterr().out == told.out


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recommend", "/no/such/model"]) == 2
    assert capsys.readouterr().err == "hackkv eval: /no/such/model: no such folder or file\n"
