"""Names of models: nothing, a folder, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hackkv.errors import CheckpointError
from hackkv.model import find_model, load_model


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
