"""The table of the CPU kernels on any CPU: a missing rival is named, and no row is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas

from bench import kernels as bench
from bench.kernels_codecs import LEVELS, READ, codec_rows
from bench.kernels_isas import CODECS, SHAPES, isa_rows
from bench.kernels_limits import MachineLimits
from bench.kernels_report import console_line, write_report
from bench.row import Row
from lab.rivals import RIVALS

LIMITS = MachineLimits(read_gb_per_s=10.0, integer_dots=100.0, one_core_dots=50.0)


@pytest.fixture(params=supported_isas())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(request.param, threads=1)


@pytest.fixture
def rows(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr("bench.race.COLD_BYTES", 1)
    return [bench.decode_row(backend, 128, 1, 1, 2, LIMITS), bench.prefill_row(backend, 128, 1, 2)]


def test_each_rival_has_a_ratio_or_is_named_as_missing(backend: CpuBackend, rows: list[Row], tmp_path: Path) -> None:
    missing = bench.missing_rivals(backend)
    write_report(tmp_path, bench.machine(backend, LIMITS, priority=False), rows)
    lines = (tmp_path / "performance.md").read_text(encoding="utf-8").splitlines()
    for row, rivals in zip(rows, (RIVALS, ("bf16",)), strict=True):
        measured = {name for name in rivals if name in row.ratios}
        assert measured == set(rivals) - set(missing)
        assert sum("sdpa" in name for name in row.ratios) >= 2
        (line,) = (line for line in lines if line.startswith(f"| {row.shape} "))
        assert line.count("not on this processor") == len(rivals) - len(measured)
        assert all(name in console_line(row, missing) for name in rivals)


@pytest.mark.slow
def test_codecs_stand_side_by_side(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.race.COLD_BYTES", 1)
    rows = codec_rows(backend, backend, (128, 128, 128))
    assert [row.what for row in rows] == [
        f"codecs, {what}" for what in ("decode", "prefill", "seal", "seal, calibrated")
    ]
    attending = ["hack", *LEVELS, "fp16", *READ]
    sealing = [name for name in attending if not name.endswith("unfused")]
    assert [list(row.speeds) for row in rows] == [attending, attending, sealing, list(LEVELS)]
    assert all(speed > 0 for row in rows for speed in row.speeds.values())
    write_report(tmp_path, bench.machine(backend, LIMITS, priority=False), rows)
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    for row in rows:
        assert f"| {row.what.removeprefix('codecs, ')}, {row.shape} " in text
        assert all(f"{name} {speed:.2f}" in console_line(row, []) for name, speed in row.speeds.items())


def test_each_instruction_set_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.race.COLD_BYTES", 1)
    rows = list(isa_rows(1, prompt=128, decode=128, sealed=128))
    prompts, decodes = ([row for row in rows if row.what.startswith(what)] for what in ("prompt, ", "decode, "))
    assert len(prompts) == len(decodes) == len(CODECS) * len(SHAPES)
    assert len(rows) == len(SHAPES) * (3 * len(CODECS) + 1)  # the default preset is sealed with feedback, too
    for row in rows:
        assert list(row.ms) == [*supported_isas(), *(["SDPA"] if row in prompts else [])]
        assert list(row.speeds) == ([] if row in prompts else supported_isas())
    write_report(tmp_path, bench.machine(CpuBackend(threads=1), LIMITS, priority=False), rows)
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert all(f"| {row.what} | {row.shape} | " in text for row in rows)
