"""The measurement of evictions, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import evictions
from hackkv.model.tiny import Tiny, write_tiny


def test_every_codec_has_a_row_and_evictions_send_a_quarter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "tiny", Tiny(max_context=1024))
    assert evictions.main([str(folder), "--tokens", "512", "--repeats", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row[0].strip("|` ") for row in rows] == list(evictions.CODECS)
    sent = {row[0].strip("|` "): float(row[1]) for row in rows}
    assert sent["snapkv"] == pytest.approx(sent["fp16"] / 4, abs=0.06)
