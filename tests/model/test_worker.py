"""Errors of a node about its kernels, before it loads a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hack_kernels.base import BackendUnavailable
from hack_kernels.cpu import extension

from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.runner import ModelRunner
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import check_worker, load_worker


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model\.backend: .*'abacus' is unknown; known: .*cpu"):
        check_worker(ModelConfig(backend="abacus"), CodecConfig())


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "CPU", "meta"])
def test_what_is_no_device_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device: '{name}' is not a device; known: cpu, cuda, cuda:N"):
        check_worker(ModelConfig(device=name), CodecConfig())


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_a_device_that_a_backend_cannot_reach_is_named_with_it(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.backend: .*cuda:99"):
        check_worker(ModelConfig(backend=backend, device="cuda:99"), CodecConfig())


def test_the_processor_may_be_named(tmp_path: Path) -> None:
    """Model, pools and batches are on the device of the setting."""
    folder = write_tiny(tmp_path, Tiny(max_context=64))
    worker = load_worker(ModelConfig(path=str(folder), dtype="float32", device="cpu"), CodecConfig())
    runner = ModelRunner(worker.model, worker.codec, 1, 1)
    assert {worker.model.device, *(pool.device for pool in runner.memory.pools)} == {torch.device("cpu")}


def test_kernels_older_than_their_sources_are_refused_with_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        extension.compiled()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    shutil.copytree(extension.SOURCES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "added.h").touch()
    monkeypatch.setattr(extension, "SOURCES", tmp_path)
    extension.compiled.cache_clear()
    for backend in ("auto", "cpu"):
        with pytest.raises(ConfigError, match=r"model\.backend: .*pip install -e \."):
            check_worker(ModelConfig(backend=backend), CodecConfig())
