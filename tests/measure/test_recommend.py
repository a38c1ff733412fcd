"""`hackkv eval --recommend`: every preset in one table, smallest first, and one line of advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hackkv.canary import Meter
from hackkv.codecs import CODECS
from hackkv.model.tiny import Tiny, write_tiny
from measure.accuracy.__main__ import main
from measure.accuracy.advice import HARD_TO_TELL


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
    assert "KV over 1 Gbit/s" in told.out
    assert told.out.splitlines()[-1].startswith("Advice: ")
    assert HARD_TO_TELL in told.out.splitlines()[-1]
    shares = [float(cells[3].rstrip("%")) for cells in table.values()]
    assert shares == sorted(shares)
    assert all(float(cells[-3]) > 0 and cells[-2] == "s" for cells in table.values()), "no preset lacks its time"
    page = (tmp_path / "out" / "tiny" / "recommended.md").read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(table)
    assert told.out.splitlines()[-1] in page
    monkeypatch.setattr(Meter, "measure", None)
    assert main(arguments) == 0
    assert capsys.readouterr().out == told.out
    assert main([*arguments, "--link-gbit-s", "0.001"]) == 0
    slow = capsys.readouterr().out
    assert "KV over 0.001 Gbit/s" in slow
    times = {line.split()[1]: float(line.split()[-3]) for line in slow.splitlines() if line.startswith("│")}
    sent = {name: times[name] - float(cells[-3]) for name, cells in table.items()}
    assert sent["fp16"] > sent["fp8"] > 0, "what was measured before is told for another link"


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_link_that_is_no_rate_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--recommend", "--link-gbit-s", rate])
    assert "--link-gbit-s" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recommend", "/no/such/model"]) == 2
    assert capsys.readouterr().err == "hackkv eval: /no/such/model: no such folder or file\n"
