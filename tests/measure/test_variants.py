"""Rows that a calibration file adds to the accuracy table."""

from __future__ import annotations

from pathlib import Path

import pytest

from hackkv.codecs.artifact import ROTATED
from hackkv.config import ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.tiny import Tiny, write_tiny
from measure.accuracy import variants
from measure.accuracy.subject import Subject, load_subject
from measure.calibrate.__main__ import main as calibrate
from tests.codecs.calibrations import calibration_tensors, save_calibration


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("variants"), Tiny(head_dim=128, max_context=1024))


@pytest.fixture(scope="module", name="subject")
def make_subject(checkpoint: Path) -> Subject:
    return load_subject(ModelConfig(path=str(checkpoint), dtype="float32", threads=1, backend="reference"))


def test_a_calibration_file_adds_rows(subject: Subject, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.safetensors"
    assert calibrate([str(checkpoint), "--tokens", "400", "--out", str(file)]) == 0
    _, plain, fitted = variants.choose(["rot-k3v2-calibrated", "rot-k3v2"], file)
    prints = [dict(subject.with_codec(each.codec).codec.fingerprint()) for each in (plain, fitted)]
    assert [each["codec.calibration"] == "none" for each in prints] == [True, False]
    with pytest.raises(ConfigError, match="'rot-k3v2-calibrated' is unknown"):
        variants.choose(["rot-k3v2-calibrated"])


@pytest.mark.slow
def test_a_file_with_bits_by_layer_adds_one_row(subject: Subject, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.safetensors"
    made = ["--tokens", "400", "--target-bytes", "18.5%", "--out", str(file)]
    assert calibrate([str(checkpoint), *made]) == 0
    _, mixed = variants.choose(["rot-k3v2-mixed"], file)
    bits = dict(subject.plan(mixed.codec).fingerprint().fields)
    assert any("," in bits[f"codec.{of}_bits"] for of in "kv"), "layers differ"
    with pytest.raises(ConfigError, match="'rot-k3v2-calibrated' is unknown"):
        variants.choose(["rot-k3v2-calibrated"], file)
    with pytest.raises(ConfigError, match=r"--calibration: .*No such file"):
        variants.choose([], tmp_path / "absent")


def test_bits_by_layer_are_a_row_of_each_preset_that_they_are_for(tmp_path: Path) -> None:
    """`rot-k4v4` has the bits of `rot-k4v4-window`."""
    file = tmp_path / "calibration.safetensors"
    bits = {"k_bits": 4, "v_bits": 4, "k": [4, 8], "v": [4, 4]}
    save_calibration(calibration_tensors(2, 1, 64), file, codec=ROTATED, layer_bits=[bits])
    names = [row.name for row in variants.calibrated(file)]
    assert names == ["rot-k4v4-mixed", "rot-k4v4-window-mixed"]
