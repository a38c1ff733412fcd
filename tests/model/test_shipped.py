"""Names of models: nothing, a folder, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hackkv.errors import CheckpointError
from hackkv.model import find_model, load_model
from hackkv.model.shipped import RANDOM_NOTE, shipped_model


def test_until_a_model_ships_a_random_one_is_made_once(tmp_path: Path) -> None:
    found = shipped_model(tmp_path / "shipped", tmp_path / "cache")
    assert (found.note, found.name) == (RANDOM_NOTE, "hackkv-random")
    made = (found.path / "model.safetensors").stat()
    assert shipped_model(tmp_path / "shipped", tmp_path / "cache") == found
    assert (found.path / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]
    load_model(found.path)


def test_a_shipped_model_is_served_without_a_note(own_tiny: Path, tmp_path: Path) -> None:
    found = shipped_model(own_tiny, tmp_path / "cache")
    assert (found.path, found.note) == (own_tiny, "")
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cache/random-v1: cannot be written"):
        shipped_model(tmp_path / "shipped", tmp_path / "cache")


def test_the_empty_name_honours_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_model("").path.is_dir()


def test_a_folder(own_tiny: Path) -> None:
    assert find_model(str(own_tiny)).path == own_tiny


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-folder"])
def test_no_such_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        find_model(name)


def test_the_hub_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/nothing: no such folder, and the hub did not deliver it"):
        find_model("nobody/nothing")
