"""Processes that share Triton's cache take turns. `tests/lab/gpu/test_ahead.py` compiles."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from hack_kernels.triton import ahead


def test_who_comes_second_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    order = list[str]()

    def second() -> None:
        begun.set()
        with ahead._turn():
            order.append("second")

    begun, thread = threading.Event(), threading.Thread(target=second)
    with ahead._turn():
        thread.start()
        assert begun.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_who_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "LOCK_S", 0.0)
    with ahead._turn(), ahead._turn():
        assert (tmp_path / "hackkv.lock").exists()


def test_a_cache_that_cannot_be_written_to_has_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with ahead._turn():
        assert not (tmp_path / "file").is_dir()
