"""The bench of wire forms, on a handful of pages."""

from __future__ import annotations

import pytest

from bench import wire_forms, wire_links
from hackkv.wire_form import wire_form
from tests.handoffs import FORMS
from tests.pair import PI, tiny_worker

IDS = range(3, 3 + 4 * PI)


@pytest.mark.parametrize("form", FORMS)
def test_pages_are_measured_by_plane(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_forms, "TOKENS", 4 * PI)
    worker = tiny_worker("hack")
    cost = wire_forms.measure(worker, list(wire_forms.chunks(worker, 2, IDS)), wire_form(form))
    planes = {plane.name: 4 * 2 * 2 * plane.page_bytes for plane in worker.codec.wire_planes[0]}
    assert cost.raw == planes
    assert (cost.coded == cost.raw) == (form == "raw")
    assert cost.row("hack", form, 2).count("|") == 9
    assert 0 < cost.decode_s < float("inf")


def test_every_choice_brings_all_pages_over_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link takes no time. A ledger opens the pages, and it accepts only a complete handoff."""
    monkeypatch.setattr(wire_forms, "TOKENS", 4 * PI)
    worker = tiny_worker("hack")
    sealed = list(wire_forms.chunks(worker, 2, IDS))
    assert wire_links.link_row("hack", 0, worker, sealed, 4 * PI).count("|") == 6
