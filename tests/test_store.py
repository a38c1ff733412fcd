"""A stored measurement is read back as it was. If that fails, one process of several measures again."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

import pytest

from hackkv.nodes import CodecLoss
from hackkv.store import Store

KEY = (("model", "tiny"), ("codec", "hack"))
LOSS = CodecLoss(0.0125, 0.97, 1.01, 600)
STORE = Store("test", CodecLoss, "a loss")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hackkv" / "test"


def forbidden() -> CodecLoss:
    raise AssertionError("it is known")


@pytest.mark.parametrize("loss", [LOSS, CodecLoss(math.inf, 0.0, math.inf, 600)])
def test_what_was_measured_comes_back(loss: CodecLoss) -> None:
    assert STORE.remembered(KEY, lambda: loss) == loss
    assert STORE.remembered(KEY, forbidden) == loss


def test_what_is_not_a_number_comes_back_too() -> None:
    STORE.remembered(KEY, lambda: CodecLoss(math.nan, 0.0, math.nan, 600))
    assert math.isnan(STORE.remembered(KEY, forbidden).kl)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": [], "loss": {}}', "\x00" * 40])
def test_a_torn_or_foreign_file_is_measured_again_and_replaced(own_cache: Path, content: str) -> None:
    STORE.remembered(KEY, lambda: LOSS)
    (file,) = own_cache.glob("*.json")
    whole = file.read_text(encoding="utf-8")
    file.write_text(content, encoding="utf-8")
    assert STORE.remembered(KEY, lambda: LOSS) == LOSS
    assert file.read_text(encoding="utf-8") == whole
    file.write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert STORE.remembered(KEY, lambda: LOSS) == LOSS
    assert STORE.remembered(KEY, forbidden) == LOSS


def test_a_measurement_that_fails_leaves_nothing(own_cache: Path) -> None:
    with pytest.raises(AssertionError):
        STORE.remembered(KEY, forbidden)
    assert not list(own_cache.glob("*.json*.part"))
    assert STORE.remembered(KEY, lambda: LOSS) == LOSS


def test_of_several_that_ask_at_once_one_measures() -> None:
    asked: list[int] = []
    barrier = threading.Barrier(4)

    def measure() -> CodecLoss:
        asked.append(1)
        return LOSS

    def ask() -> None:
        barrier.wait()
        assert STORE.remembered(KEY, measure) == LOSS

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_a_cache_that_cannot_be_written_is_said_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert STORE.remembered(KEY, lambda: LOSS) == LOSS
    assert "is measured at every start" in caplog.text
