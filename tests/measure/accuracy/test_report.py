"""The report of `hackkv eval`, on the files from which docs/accuracy.md was made."""

from __future__ import annotations

from pathlib import Path

from measure.accuracy import cells, results
from measure.accuracy.report import markdown


def test_machines_are_named_whole_and_without_who_served_the_pages() -> None:
    """The pages of one codec were served by two sets of kernels."""
    found = [results.read(folder) for folder in cells.models(Path("docs/accuracy"))]
    assert any(", pages by cpu, reference)" in cell.key["kernels"] for each in found for cell in each.files)
    machines = {line for line in markdown(found, {}, {}, {}).splitlines() if line.startswith("- Machine: ")}
    assert machines
    assert all(line.endswith(("kernels: cpu.", ").")) and "pages by" not in line for line in machines)
